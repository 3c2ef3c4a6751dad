"""`enginecast bench`: the engine of a bundle, and other ways to run its model, timed in turns."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from enginecast.bench.contenders import (
    PEERS,
    Contender,
    DeviceEngineContender,
    Feeds,
    PeerError,
    of_engine,
    peer,
)
from enginecast.bench.inputs import given_inputs, one_kind
from enginecast.bench.memory import on_gpu, resident, taken
from enginecast.bench.timing import Times, interleaved, ratio, wall_clock
from enginecast.errors import UsageError
from enginecast.installation import required
from enginecast.runtime.bundle.reader import Check
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
    threads: int | None = None,
    device: str | None = None,
    providers: Sequence[str] | None = None,
    prefer: Sequence[str] | None = None,
    allow_code: bool = False,
    trust: str | os.PathLike[str] | None = None,
    check: Check = "full",
    random_weights: int | None = None,
    tuned: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Time the engine of a bundle, and other ways to run the model that it was made from.

    Args:
        model: MODEL that the bundle was made from, for what is timed beside it.
        against: some of `PEERS`, the first of which ratios are of.
        inputs: safetensors; None: the largest verification inputs that the bundle holds.
        prompts: a text file, one prompt a line, instead.
        rounds: samples of each contender, at most.
        seconds: that all samples may take, about.
        threads: within an op, for all of them.
        random_weights: seed, for a MODEL that is a config alone.
        say: gets a sentence before each step that may take long.

    The other arguments are those of `load`.

    Raises:
        UsageError: the options do not fit together.
        BundleError: the bundle is damaged, or holds no inputs and none were given.
        MissingError: this machine cannot run the engine, or lacks torch, which peers need.
    """
    one_kind(inputs, prompts)
    require_threads(threads)
    _check(model, against)
    gpu = _is_gpu(device, providers, prefer)
    measure = on_gpu if gpu else resident
    how = {"device": device, "providers": providers, "prefer": prefer, "threads": threads}
    say("loading the engine")
    open_engine = partial(
        load,
        path,
        require="verified-by-emulation",
        allow_code=allow_code,
        trust=trust,
        check=check,
        tuned=tuned,
        **how,  # type: ignore[arg-type]
    )
    before = measure()
    with open_engine() as engine, torch_threads(threads) if against else nullcontext():
        given = given_inputs(engine, inputs, prompts)
        feeds = given.feeds
        own = of_engine(engine, feeds)
        found = {own.name: own.outputs()}  # whose errors are the caller's
        memory = {own.name: max(measure() - before, 0)}
        contenders: dict[str, Contender] = {}
        absent = []
        notes: tuple[str, ...] = ()
        if against:
            make, notes = _peers(engine, model or "", feeds, how, allow_code, random_weights)
            for name in dict.fromkeys(against):
                say(f"making {name}")
                try:
                    contenders[name], memory[name] = taken(partial(make, name), measure)
                    found[name] = contenders[name].outputs()
                except PeerError as error:
                    absent.append(error.message)
        contenders[own.name] = own
        wanted = given.exact or found.get("eager")
        say("timing " + ", ".join(contenders))
        clock = _cuda_clock if isinstance(own, DeviceEngineContender) else wall_clock
        calls = {name: contender.call for name, contender in contenders.items()}
        times = interleaved(calls, rounds=rounds, seconds=seconds, clock=clock)
        masks = _masks(engine, feeds)
        masked = frozenset[str]() if given.reference is None else given.reference.masked
        base = next(iter(times.values()))
        items = sum(_items(each) for each in feeds)
        rows = tuple(
            Row(
                name=name,
                times=each,
                ratio=ratio(base, each),
                items=1e3 * items / each.median,
                memory=memory[name],
                accuracy=None if wanted is None else _accuracy(found[name], wanted, masks, masked),
            )
            for name, each in times.items()
        )
        return Bench(
            rows=rows,
            shapes=given.shapes,
            inputs=given.origin,
            compared="" if wanted is None else "eager" if given.exact is None else "fp64",
            absent=tuple(absent),
            notes=(*given.notes, *notes),
            backend=engine.backend,
            threads=threads,
            settings=engine.settings,
            machine=_machine(engine.versions()),
        )


def require_threads(threads: int | None) -> None:
    """Refuse more threads than this machine has cores."""
    if threads is not None and threads > cores():
        raise UsageError(f"--threads {threads}: expected at most {cores()}, the cores here")


def _check(model: str | None, against: Sequence[str]) -> None:
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
            import torch  # noqa: F401  # before memory is measured: it is no part of an engine


def _is_gpu(
    device: str | None, providers: Sequence[str] | None, prefer: Sequence[str] | None
) -> bool:
    """Whether an engine on a GPU was asked for, in one of the ways in which `load` is asked."""
    asked = (device or "", *(providers or ())[:1], *(prefer or ())[:1])
    return any(name and "cpu" not in name.lower() for name in asked)


def _peers(
    engine: Engine,
    model: str,
    feeds: Feeds,
    how: Mapping[str, Any],
    allow_code: bool,
    random_weights: int | None,
) -> tuple[Callable[[str], Contender], tuple[str, ...]]:
    """What makes each peer, and notes on the model."""
    import torch

    from enginecast.capture.outputs.flatten import parse_wanted
    from enginecast.compiler.recompare import open_again, options_of, same_model

    manifest = engine.manifest
    options = options_of(manifest, allow_code=allow_code, random_weights=random_weights)
    source = open_again(model, options, manifest)
    wanted = parse_wanted(options.outputs, options.hidden_states)
    device = "cuda" if _is_gpu(how["device"], how["providers"], how["prefer"]) else "cpu"
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = low.get(manifest.precision, torch.float32) if device == "cuda" else torch.float32

    def make(name: str) -> Contender:
        return peer(name, source, wanted, feeds, device=device, dtype=dtype, threads=how["threads"])

    return make, same_model(model, source, manifest)


def _masks(engine: Engine, feeds: Feeds) -> list[Array | None]:
    """The attention mask of each call."""
    name = next((s.name for s in engine.inputs if s.kind == "attention_mask"), None)
    return [None if name is None else each[name] for each in feeds]


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


def _machine(runtime: Mapping[str, str]) -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "versions": {**runtime, **installed(*PACKAGES)},
    }
