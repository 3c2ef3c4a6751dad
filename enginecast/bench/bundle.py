"""`enginecast bench`: the engine of a bundle, and other ways to run its model, timed in turns."""

import gc
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginecast.bench.contenders import PEERS, Contender, Feeds, PeerError, of_engine, peer
from enginecast.bench.inputs import given_inputs, one_kind
from enginecast.bench.timing import Times, interleaved, ratio, wall_clock
from enginecast.errors import UsageError
from enginecast.installation import required
from enginecast.runtime.device.machine import cores, processor
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.runtime.device.versions import installed
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.sessions.settings import Settings
from enginecast.runtime.values.arrays import Array
from enginecast.verification.metrics import compare, pool

ROUNDS = 15
SECONDS = 60.0
PACKAGES = ("torch", "transformers", "numpy")
STATUS = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class Accuracy:
    """How far outputs are from what they are compared with."""

    cosine: float
    """Lowest of a row, over all outputs of floats; 1 where there are none."""
    relative: float
    """Largest relative L2 error of an output; of integers and booleans, the share that differs."""


@dataclass(frozen=True)
class Row:
    """One contender."""

    name: str
    times: Times
    ratio: float
    """How many times faster than the first row."""
    items: float
    """Per second."""
    memory: int
    """Bytes that loading it and a first run left in memory."""
    accuracy: Accuracy | None
    """None where there is nothing to compare with."""


@dataclass(frozen=True)
class Bench:
    """What was measured in one run."""

    rows: tuple[Row, ...]
    """Peers first, and the engine last."""
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    """Of the inputs of each call."""
    inputs: str
    """Where they come from, in words."""
    compared: str
    """What accuracy is measured against, in words; empty: nothing."""
    absent: tuple[str, ...]
    """Peers that could not be made or run, each with the reason."""
    notes: tuple[str, ...]
    backend: str
    threads: int | None
    settings: Settings
    """How the engine was opened."""
    machine: Mapping[str, Any]


def bench_bundle(
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    against: Sequence[str] = (),
    inputs: Path | None = None,
    prompts: Path | None = None,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    random_weights: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    **how: Any,
) -> Bench:
    """Time the engine of a bundle, and other ways to run the model that it was made from.

    Args:
        model: MODEL that the bundle was made from, for what is timed beside it.
        against: some of `PEERS`, the first of which ratios are of.
        inputs: safetensors; None: the largest verification inputs that the bundle holds.
        prompts: a text file, one prompt a line, instead.
        rounds: samples of each contender, at most.
        seconds: that all samples may take, about.
        random_weights: seed, for a MODEL that is a config alone.
        say: gets a sentence before each step that may take long.
        how: of `load`; `threads` are within an op, for all contenders.

    Raises:
        UsageError: the options do not fit together.
        BundleError: the bundle is damaged, or holds no inputs and none were given.
        MissingError: this machine cannot run the engine, or lacks torch, which peers need.
    """
    one_kind(inputs, prompts)
    threads: int | None = how.get("threads")
    require_threads(threads)
    for name in against:
        if name not in PEERS:
            raise UsageError(f"--against {name}: expected some of {', '.join(PEERS)}")
    if bool(against) != (model is not None):
        raise UsageError(
            "--model and --against go together",
            hint=f"Such as --model MODEL --against {','.join(PEERS)}.",
        )
    if against:
        with required("torch", "--against", "export"):
            import torch  # noqa: F401  # before memory is measured: it is not part of an engine
    # A GPU may be asked for in each of the ways in which `load` is asked.
    first = [(how.get(name) or ("",))[0] for name in ("providers", "prefer")]
    gpu = any(n and "cpu" not in n.lower() for n in (how.get("device") or "", *first))
    measure = _on_gpu if gpu else resident
    say("loading the engine")
    before = measure()
    opened = load(path, require="verified-by-emulation", **how)
    with opened as engine, torch_threads(threads) if against else nullcontext():
        given = given_inputs(engine, inputs, prompts)
        feeds = given.feeds
        own = of_engine(engine, feeds)
        found = {"engine": own.outputs()}  # whose errors are the caller's
        memory = {"engine": max(measure() - before, 0)}
        contenders: dict[str, Contender] = {}
        absent = []
        notes: tuple[str, ...] = ()
        if against:
            device = "cuda" if gpu else "cpu"
            allowed = bool(how.get("allow_code"))
            make, notes = _peers(
                engine, model or "", feeds, device, threads, allowed, random_weights
            )
            for name in dict.fromkeys(against):
                say(f"making {name}")
                before = measure()
                try:
                    contenders[name] = make(name)
                    memory[name] = max(measure() - before, 0)
                    found[name] = contenders[name].outputs()
                except PeerError as error:
                    absent.append(error.message)
        contenders["engine"] = own
        wanted = given.exact or found.get("eager")
        say("timing " + ", ".join(contenders))
        clock = _cuda_clock if own.on_gpu else wall_clock
        calls = {name: contender.call for name, contender in contenders.items()}
        times = interleaved(calls, rounds=rounds, seconds=seconds, clock=clock)
        mask = next((s.name for s in engine.inputs if s.kind == "attention_mask"), None)
        masks = [None if mask is None else each[mask] for each in feeds]
        masked = frozenset[str]() if given.reference is None else given.reference.masked
        base = next(iter(times.values()))
        items = sum(_items(each) for each in feeds)
        return Bench(
            rows=tuple(
                Row(
                    name=name,
                    times=each,
                    ratio=ratio(base, each),
                    items=1e3 * items / each.median,
                    memory=memory[name],
                    accuracy=None
                    if wanted is None
                    else _accuracy(found[name], wanted, masks, masked),
                )
                for name, each in times.items()
            ),
            shapes=given.shapes,
            inputs=given.origin,
            compared="" if wanted is None else "eager" if given.exact is None else "fp64",
            absent=tuple(absent),
            notes=(*given.notes, *notes),
            backend=engine.backend,
            threads=threads,
            settings=engine.settings,
            machine={
                "system": platform.platform(),
                "processor": processor(),
                "cores": cores(),
                "python": platform.python_version(),
                "versions": {**engine.versions(), **installed(*PACKAGES)},
            },
        )


def require_threads(threads: int | None) -> None:
    """Refuse more threads than this machine has cores."""
    if threads is not None and threads > cores():
        raise UsageError(f"--threads {threads}: expected at most {cores()}, the cores here")


def resident() -> int:
    """Bytes of this process in memory, shared pages by their share; 0 where there is no /proc."""
    gc.collect()
    if not STATUS.exists():
        return 0
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    found = next((line.split()[1] for line in lines if line.startswith("Pss:")), "0")
    return int(found) * 1024


def _on_gpu() -> int:
    """Bytes that are taken on the current GPU, by whomever; 0 where nothing counts them."""
    try:
        import torch
    except ImportError:
        return 0
    if not torch.cuda.is_available():
        return 0
    free, whole = torch.cuda.mem_get_info()
    return int(whole - free)


def _peers(
    engine: Engine,
    model: str,
    feeds: Feeds,
    device: str,
    threads: int | None,
    allow_code: bool,
    random_weights: int | None,
) -> tuple[Callable[[str], Contender], tuple[str, ...]]:
    """What makes each peer, and notes on the model."""
    import torch

    from enginecast.capture.outputs.flatten import parse_wanted
    from enginecast.compiler.verify.recompare import open_again, options_of, same_model

    manifest = engine.manifest
    options = options_of(manifest, allow_code=allow_code, random_weights=random_weights)
    source = open_again(model, options, manifest, engine.folder)
    wanted = parse_wanted(options.outputs, options.hidden_states)
    low = {"fp16": torch.float16, "bf16": torch.bfloat16} if device == "cuda" else {}
    dtype = low.get(manifest.precision, torch.float32)

    def make(name: str) -> Contender:
        return peer(name, source, wanted, feeds, device=device, dtype=dtype, threads=threads)

    return make, same_model(model, source, manifest)


def _accuracy(
    outputs: Sequence[Mapping[str, Array]],
    wanted: Sequence[Mapping[str, Array]],
    masks: Sequence[Array | None],
    masked: frozenset[str],
) -> Accuracy:
    cosine, relative = 1.0, 0.0
    pairs = zip(outputs, wanted, masks, strict=True)
    compared = [compare(o, w, attention_mask=m, masked=masked) for o, w, m in pairs]
    for name in dict.fromkeys(name for found in compared for name in found):
        metrics = pool(found[name] for found in compared if name in found)
        relative = max(relative, metrics.relative)
        if metrics.wrong is None:
            cosine = min(cosine, metrics.cosine)
    return Accuracy(cosine, relative)


def _items(feeds: Mapping[str, Array]) -> int:
    """Rows of the first input: prompts, or images."""
    first = next(iter(feeds.values()), None)
    return 1 if first is None or first.ndim == 0 else int(first.shape[0])


def _cuda_clock(call: Callable[[], object], times: int) -> float:
    """Seconds on the GPU's clock, from the first launch to the last result."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
