"""How fast an engine is here before it is published, and where its time goes: a few calls."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enginecast.bench.contenders import PeerError, eager_module, tensors_of
from enginecast.bench.timing import FEWEST, WARM_UPS, Times, interleaved
from enginecast.capture.inputs.examples import sample, sizes_with
from enginecast.capture.inputs.given import given_prompts
from enginecast.capture.inputs.specs import SEQUENCE, DimSpec, InputSpec, named_dims
from enginecast.compiler.prepare.cases import SEED
from enginecast.compiler.prepare.program import OpenedModel
from enginecast.compiler.publication.bundle import Candidate, Timing
from enginecast.errors import EnginecastError, first_line
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.registry import session_class
from enginecast.runtime.values.arrays import Array
from enginecast.verification.eager.outputs import as_arrays
from enginecast.verification.engine import as_declared
from enginecast.verification.report.data import LayerTime, Profile

SHARE = 0.15
"""Part of the export's time that it may take, about."""
MOST = 3.0
"""Seconds that it may take, about."""
LARGEST = 1 << 30
"""Bytes of an engine for which neither eager nor the engine is opened once more."""
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
ALIKE = 0.95
"""A ratio below is one of an engine that is slower than eager, and not of chance."""

Feeds = Mapping[str, Array]


@dataclass(frozen=True)
class SpeedAt:
    """An engine beside eager fp32, at some sizes."""

    shapes: Mapping[str, tuple[int, ...]]
    engine: Times
    eager: Times

    @property
    def sizes(self) -> str:
        """Of the first input: "32x24"."""
        return "x".join(map(str, next(filter(None, self.shapes.values()), (1,))))

    @property
    def gain(self) -> Times:
        """How many times faster than eager it was in each round."""
        return self.engine.over(self.eager)

    def __str__(self) -> str:
        gain = self.gain.median
        return f"{gain:.{1 if gain >= ALIKE else 2}f}x eager at {self.sizes}" + (
            "" if gain >= ALIKE else " (slower)"
        )


@dataclass(frozen=True)
class ExportSpeed:
    """An engine on a CPU beside eager fp32."""

    cases: Sequence[SpeedAt]
    """One row first, then many."""
    precision: str
    threads: int
    is_busy: bool = False
    """Whether the machine did much else."""

    def __str__(self) -> str:
        first, *others = map(str, self.cases)
        said = ", ".join([first, *(other.replace(" eager", "", 1) for other in others)])
        what = "fp32" if self.precision == "fp32" else f"{self.precision} against eager fp32,"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        busy = ", which was busy" if self.is_busy else ""
        return f"{said} ({what} on {threads} of this CPU{busy})"

    def to_json(self) -> dict[str, Any]:
        """What `export --json` has of it; the first case by itself, for who reads one number."""
        cases = [
            {
                "eager": case.gain.median,
                "quartiles": list(case.gain.spread),
                "rounds": len(case.gain.wall),
                "shapes": {name: list(shape) for name, shape in case.shapes.items()},
                "milliseconds": {"engine": case.engine.median, "eager": case.eager.median},
            }
            for case in self.cases
        ]
        first = {name: value for name, value in cases[0].items() if name != "milliseconds"}
        return {**first, "cases": cases, "threads": self.threads, "busy": self.is_busy}


def export_timing(
    candidate: Candidate,
    bundle: Bundle,
    seconds: float,
    threads: int | None,
    prompts: Path | None = None,
) -> Timing:
    """Time the first engine and eager in turns, for one row and for many, and each node of the
    engine; nothing of that where it does not run here as on its target, is large, or takes too
    long.

    Args:
        bundle: the engine's, about to be published.
        seconds: that the export took.
        threads: within an op, of both; None: as many as torch takes.
        prompts: the user's texts; None: inputs are drawn.
    """
    config = candidate.config
    is_native = candidate.runs[0].verdict.engine == "ran"
    if not config.runs_here or config.device != "cpu" or not is_native:
        return Timing()
    record = bundle.manifest.engines[0]
    if sum(bundle.path(name).stat().st_size for name in candidate.artifacts[0].files) > LARGEST:
        return Timing()
    room = min(MOST, SHARE * seconds)
    texts = () if prompts is None else given_prompts(prompts)
    threads = threads or torch.get_num_threads()  # OMP_NUM_THREADS sets those of torch alone
    try:
        opened = session_class(record.target).open(bundle, record, config.providers, threads)
        with Engine(bundle, record, opened) as engine, torch_threads(threads), torch.no_grad():
            runs = _runs(candidate, engine, texts, room)
            profiles = [
                _profile(candidate, bundle, engine, run.feeds, threads, room / 8)
                for run in runs
                if run.seconds * PROFILED_RUNS <= room / 2
            ]
            cases = tuple(run.speed for run in runs if run.speed is not None)
    except EnginecastError:  # it is published all the same
        return Timing()
    is_busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    speed = ExportSpeed(cases, config.asked_precision, threads, is_busy) if cases else None
    return Timing(speed, tuple(profile for profile in profiles if profile is not None))


@dataclass(frozen=True)
class _Run:
    """Inputs that the engine was run on."""

    feeds: Feeds
    seconds: float
    """That the engine takes, about."""
    speed: SpeedAt | None
    """None: it would have taken too long."""


def _runs(
    candidate: Candidate, engine: Engine, texts: Sequence[str], room: float
) -> tuple[_Run, ...]:
    """One row beside eager, and as many rows as the time allows."""
    model, start = candidate.model, time.perf_counter()
    names = [spec.name for spec in model.inputs]
    module = eager_module(model.source, model.wanted, names, device="cpu", dtype=torch.float32)

    def beside(feeds: Feeds, rounds: int, seconds: float, warm_ups: int) -> SpeedAt:
        there = tensors_of(feeds, "cpu", torch.float32)
        calls = {"eager": lambda: module(**there), "engine": lambda: engine.run(feeds)}
        found = interleaved(calls, rounds=rounds, seconds=seconds, warm_ups=warm_ups)
        return SpeedAt(_shapes_of(feeds), found["engine"], found["eager"])

    feeds, once, eager_once = _first(candidate, engine, module, texts)
    if (once + eager_once) * (FEWEST + WARM_UPS) > room:
        return (_Run(feeds, once, None),)
    one = beside(feeds, 2 * FEWEST, room / 4, WARM_UPS)
    runs = (_Run(feeds, one.engine.median / 1e3, one),)
    pair = (one.engine.median + one.eager.median) / 1e3
    left = room - (time.perf_counter() - start)
    for rows in _batches(model.inputs):
        # Rows together take less than one by one: about half, on the models that were tried.
        if pair * rows * (MANY_ROUNDS + 1) > 2 * left:
            continue
        try:
            feeds = as_declared(engine, _drawn(model, rows, texts))
            many = beside(feeds, MANY_ROUNDS, left, 1)
        except Exception:  # the model's own code, or sizes that it tells apart
            break
        return (*runs, _Run(feeds, many.engine.median / 1e3, many))
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
