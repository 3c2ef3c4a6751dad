"""How fast an engine is here before it is published, and where its time goes: a few calls.

An engine of another precision is timed beside the fp32 engine of the same model, too: what is
smaller or of fewer bits may be slower on the machine at hand, and then its user should know.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from enginecast.bench.contenders import PeerError, eager_module, tensors_of
from enginecast.bench.timing import FEWEST, WARM_UPS, interleaved
from enginecast.capture.inputs.examples import sample, sizes_with
from enginecast.capture.inputs.given import given_prompts
from enginecast.capture.inputs.specs import SEQUENCE, DimSpec, InputSpec, named_dims
from enginecast.compiler.engines.lower_and_run import lowering_request, unsealed
from enginecast.compiler.engines.rewrite import Rewritten
from enginecast.compiler.prepare.cases import SEED
from enginecast.compiler.prepare.program import OpenedModel, Prepared
from enginecast.compiler.publication.bundle import Candidate, Timing
from enginecast.compiler.publication.manifest import describe_program
from enginecast.doctor.checks import cpu_class
from enginecast.errors import EnginecastError, first_line
from enginecast.exporters.registry import target_of
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.registry import session_class
from enginecast.runtime.values.arrays import Array
from enginecast.verification.eager.outputs import as_arrays
from enginecast.verification.engine import as_declared
from enginecast.verification.report.data import LayerTime, Profile
from enginecast.verification.report.speed import Speed, SpeedAt
from enginecast.verification.report.tables import size

SHARE = 0.15
"""Part of the export's time that it may take, about."""
MOST = 3.0
"""Seconds that it may take, about."""
LARGEST = 1 << 30
"""Bytes of an engine from which on it is not opened once more to be timed."""
PROFILED_RUNS = 4
"""Runs that have to fit into the time for nodes to be timed; the profiler slows them a little."""
MANY_ROUNDS = 3
"""Of many rows, whose calls take long enough to differ little."""
BUSY = 1.5
"""Runnable threads for each core from which on others take the time that is measured."""
ROWS = (32, 16, 8, 4, 2)
"""Batches that are timed besides one row: the largest that fits into the range and the time."""
TOKENS = 32
"""Of a text, where nobody gave one."""

Feeds = Mapping[str, Array]


def export_timing(
    candidate: Candidate,
    bundle: Bundle,
    seconds: Mapping[str, float],
    threads: int | None,
    prompts: Path | None = None,
    *,
    for_size: bool = False,
) -> Timing:
    """Time the first engine, eager and the fp32 engine in turns, for one row and for many, and each
    node of the engine; nothing of that where it does not run here as on its target, is large, or
    takes too long.

    Args:
        bundle: the engine's, about to be published.
        seconds: that each step of the export took.
        threads: within an op, of both; None: as many as torch takes.
        prompts: the user's texts; None: inputs are drawn.
        for_size: whether the user wants a small engine rather than a fast one.
    """
    config = candidate.config
    is_native = candidate.runs[0].verdict.engine == "ran"
    if not config.runs_here or config.device != "cpu" or not is_native:
        return Timing()
    record = bundle.manifest.engines[0]
    own = sum(bundle.path(name).stat().st_size for name in candidate.artifacts[0].files)
    if own > LARGEST:
        return Timing()
    room = min(MOST, SHARE * sum(seconds.values()))
    texts = () if prompts is None else given_prompts(prompts)
    threads = threads or torch.get_num_threads()  # OMP_NUM_THREADS sets those of torch alone
    try:
        opened = session_class(record.target).open(bundle, record, config.providers, threads)
        with ExitStack() as stack, torch_threads(threads), torch.no_grad():
            engine = stack.enter_context(Engine(bundle, record, opened))
            fp32_engine = cache(lambda: _fp32_engine(candidate, seconds, threads, stack))
            runs = _runs(candidate, engine, fp32_engine, texts, room)
            profiles = [
                _profile(candidate, bundle, engine, run.feeds, threads, room / 8)
                for run in runs
                if run.seconds * PROFILED_RUNS <= room / 2
            ]
    except EnginecastError:  # it is published all the same
        return Timing()
    profiled = tuple(profile for profile in profiles if profile is not None)
    cases = tuple(run.speed for run in runs if run.speed is not None)
    if not cases:
        return Timing(None, profiled)
    is_busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    speed = Speed(
        cases,
        config.asked_precision,
        threads,
        is_busy,
        cpu_class(),
        _advice(config.asked_precision, cases, own, fp32_engine().size, for_size=for_size),
        fp32_engine().why_none,
    )
    return Timing(speed, profiled)


@dataclass(frozen=True)
class _Fp32Engine:
    """The engine that an export in fp32 makes for the same target, or why there is none."""

    engine: Engine | None = None
    size: int = 0
    """Bytes."""
    why_none: str = ""


def _fp32_engine(
    candidate: Candidate, seconds: Mapping[str, float], threads: int, stack: ExitStack
) -> _Fp32Engine:
    """Make it of the program that was captured, and open it until the stack is left.

    It is timed and thrown away, so nothing but its speed is asked of it.
    """
    config, model = candidate.config, candidate.model
    if config.asked_precision == "fp32":
        return _Fp32Engine()
    if not isinstance(model, Prepared) or not config.pipeline:
        return _Fp32Engine(why_none="this one is made from the module itself")
    weights = 4 * sum(model.source.weight_elements().values())
    if weights > LARGEST:
        return _Fp32Engine(why_none=f"its weights would take {size(weights)}")
    # It takes about as long as the engine that was just made for the same target.
    cost = seconds.get("lower", 0.0)
    if cost > max(MOST, SHARE * sum(seconds.values())):
        return _Fp32Engine(why_none=f"it would take {cost:.0f} s to make")
    target = target_of(config.target)
    text = target.pipeline("fp32", device=config.device)
    plain = replace(config, precision="fp32", quantized="", pipeline=text, plan=None, also=())
    try:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="enginecast-fp32-")))
        program = structural_copy(model.captured.program)
        run_pipeline(build(plain.pipeline), program, model.context)
        lowered = structural_copy(program)
        run_pipeline(build(plain.lowering), lowered, model.context)
        artifact = target.lower(lowering_request(model, plain, lowered, folder))
        rewritten = Rewritten(program, (), (), None, candidate.reference)
        manifest = describe_program(model, plain, rewritten, (artifact,))
        made = unsealed(folder, manifest, artifact.files)
        record = manifest.engines[0]
        opened = session_class(record.target).open(made, record, config.providers, threads)
        engine = stack.enter_context(Engine(made, record, opened))
    except Exception as error:  # what was to be exported is there, and is published all the same
        return _Fp32Engine(why_none=f"it cannot be made: {first_line(error)}")
    return _Fp32Engine(engine, sum((folder / name).stat().st_size for name in artifact.files))


def _advice(
    precision: str, cases: Sequence[SpeedAt], own: int, fp32: int, *, for_size: bool
) -> str:
    """What to do with an engine that is slower than the fp32 one; empty: nothing."""
    slow = [case.sizes for case in cases if case.is_slower]
    if not slow:
        return ""
    here = "use --precision fp32 on this machine"
    here += "" if len(slow) == len(cases) else f" for sizes like {' and '.join(slow)}"
    smaller = f"{size(own)} instead of {size(fp32)} in fp32"
    if for_size:
        return f"the trade of --optimize size: {smaller}"
    if precision.endswith("-storage"):
        return f"the trade of storing weights in few bits: {smaller}"
    if precision != "int8":
        return f"{here}, and {precision} on one that computes in it"
    lack = ", whose CPU has no VNNI" if "VNNI" not in (cpu_class() or "VNNI") else ""
    return (
        f"{here}{lack}; where size counts more, say --optimize size ({precision} takes {smaller})"
    )


@dataclass(frozen=True)
class _Run:
    """Inputs that the engine was run on."""

    feeds: Feeds
    seconds: float
    """That the engine takes, about."""
    speed: SpeedAt | None
    """None: it would have taken too long."""


def _runs(
    candidate: Candidate,
    engine: Engine,
    fp32_engine: Callable[[], _Fp32Engine],
    texts: Sequence[str],
    room: float,
) -> tuple[_Run, ...]:
    """One row beside eager and the fp32 engine, and as many rows as the time allows."""
    model = candidate.model
    names = [spec.name for spec in model.inputs]
    module = eager_module(model.source, model.wanted, names, device="cpu", dtype=torch.float32)

    def beside(feeds: Feeds, rounds: int, seconds: float, warm_ups: int) -> SpeedAt:
        there = tensors_of(feeds, "cpu", torch.float32)
        calls: dict[str, Callable[[], object]] = {
            "eager": lambda: module(**there),
            "engine": lambda: engine.run(feeds),
        }
        if fp32 is not None:
            wide = as_declared(fp32, feeds)
            calls["fp32"] = partial(fp32.run, wide)
        found = interleaved(calls, rounds=rounds, seconds=seconds, warm_ups=warm_ups)
        gain, wider = found["engine"].over(found["eager"]), None
        if fp32 is not None:
            wider = found["engine"].over(found["fp32"])
        return SpeedAt(
            gain.median,
            gain.spread,
            len(gain.wall),
            _shapes_of(feeds),
            {name: times.median for name, times in found.items()},
            None if wider is None else wider.median,
            None if wider is None else wider.spread,
        )

    feeds, once, eager_once = _first(candidate, engine, module, texts)
    if (once + eager_once) * (FEWEST + WARM_UPS) > room:
        return (_Run(feeds, once, None),)
    fp32, start = fp32_engine().engine, time.perf_counter()
    one = beside(feeds, 2 * FEWEST, room / 4, WARM_UPS)
    runs = (_Run(feeds, one.milliseconds["engine"] / 1e3, one),)
    turn = sum(one.milliseconds.values()) / 1e3
    left = room - (time.perf_counter() - start)
    for rows in _batches(model.inputs):
        # Rows together take less than one by one: about half, on the models that were tried.
        if turn * rows * (MANY_ROUNDS + 1) > 2 * left:
            continue
        try:
            feeds = as_declared(engine, _drawn(model, rows, texts))
            many = beside(feeds, MANY_ROUNDS, left, 1)
        except Exception:  # the model's own code, or sizes that it tells apart
            break
        return (*runs, _Run(feeds, many.milliseconds["engine"] / 1e3, many))
    return runs


def _shapes_of(feeds: Feeds) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in feeds.items()}


def _first(
    candidate: Candidate, engine: Engine, module: nn.Module, texts: Sequence[str]
) -> tuple[Feeds, float, float]:
    """One row that engine and eager take, and the seconds of each; else the first case."""
    case = candidate.reference.cases[0].inputs
    for draw in (lambda: _drawn(candidate.model, 1, texts), lambda: case):
        try:
            feeds = as_declared(engine, draw())
            there = tensors_of(feeds, "cpu", torch.float32)
            module(**there)  # the first call of a module takes longer than the others
            start = time.perf_counter()
            engine.run(feeds)
            between = time.perf_counter()
            module(**there)
        except Exception as error:  # the model's own code: not every value fits every model
            failure = error
        else:
            return feeds, between - start, time.perf_counter() - between
    raise PeerError(f"eager: {type(failure).__name__}: {first_line(failure)}") from failure


def _batches(specs: Sequence[InputSpec]) -> list[int]:
    """Numbers of rows to try, the largest first; none where the batch does not vary."""
    batch = _batch_of(specs)
    if batch is None:
        return []
    least = batch.fit(1)
    return [rows for rows in dict.fromkeys(map(batch.fit, ROWS)) if rows > least]


def _batch_of(specs: Sequence[InputSpec]) -> DimSpec | None:
    """The first dimension of the inputs, where it varies by itself."""
    first = next((spec.dims[0] for spec in specs if spec.dims), None)
    is_free = first is not None and first.name not in (None, SEQUENCE) and not first.parts
    return first if is_free else None


def _drawn(model: OpenedModel, rows: int, texts: Sequence[str]) -> Feeds:
    """Inputs of so many rows: the user's texts, or values as they are drawn for verification."""
    specs, batch = model.inputs, _batch_of(model.inputs)
    if texts:
        middle = sorted(texts, key=len)[len(texts) // 2]
        chosen = [middle] if rows == 1 else list(islice(cycle(texts), rows))
        encoded = model.source.encode(chosen, specs)
        if encoded is not None and all(spec.name in encoded for spec in specs):
            return as_arrays({spec.name: encoded[spec.name] for spec in specs})
    tokens = {s.dims[-1].name for s in specs if s.kind == "token_ids" and s.dims}
    sizes = {
        name: dim.fit(dim.given or (TOKENS if name in tokens else dim.size))
        for name, dim in named_dims(specs).items()
    }
    if batch is not None and batch.name is not None:
        sizes[batch.name] = batch.fit(rows)
    return as_arrays(sample(specs, sizes_with(specs, sizes), SEED))


def _profile(
    candidate: Candidate,
    bundle: Bundle,
    engine: Engine,
    feeds: Feeds,
    threads: int | None,
    seconds: float,
) -> Profile | None:
    """Time each node of the engine; None: its runtime does not."""
    record, providers = engine.record, candidate.config.providers
    session = session_class(record.target)
    times = session.node_times(bundle, record, providers, threads, feeds, seconds)
    if times is None:
        return None
    modules = candidate.artifacts[0].modules
    spent_in: dict[tuple[str, str], list[float]] = {}
    for name, op, spent in times.nodes:
        # ONNX Runtime calls what it fuses by the first of the nodes: "node_linear/MatMulAddFusion".
        module = modules.get(name, modules.get(name.partition("/")[0], ""))
        spent_in.setdefault((module, op), []).append(spent)
    layers = tuple(
        LayerTime(module, op, len(spent), sum(spent)) for (module, op), spent in spent_in.items()
    )
    return Profile(engine.provider, times.runs, _shapes_of(feeds), layers)
