"""How fast an engine is here before it is published, and where its time goes: a few calls."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from enginecast.bench.contenders import of_engine, peer
from enginecast.bench.timing import FEWEST, WARM_UPS, Times, interleaved
from enginecast.compiler.publication.bundle import Candidate, Timing
from enginecast.errors import EnginecastError
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.registry import session_class
from enginecast.verification.engine import feeds_of
from enginecast.verification.report.data import LayerTime, Profile

SHARE = 0.1
"""Part of the export's time that it may take."""
MOST = 1.0
"""Seconds that it may take."""
LARGEST = 1 << 30
"""Bytes of an engine for which neither eager nor the engine is opened once more."""
PROFILED_RUNS = 4
"""Runs that have to fit into the time for nodes to be timed; the profiler slows them a little."""


@dataclass(frozen=True)
class ExportSpeed:
    """An engine on a CPU beside eager fp32."""

    speeds: Times
    """How many times faster than eager it was in each round."""
    shapes: dict[str, tuple[int, ...]]
    """Of the inputs: those of the first case."""

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        low, high = self.speeds.spread
        return f"{self.speeds.median:.1f}x eager on this machine ({low:.1f}-{high:.1f}): {shapes}"

    def to_json(self) -> dict[str, Any]:
        """What `export --json` has of it."""
        return {
            "eager": self.speeds.median,
            "quartiles": list(self.speeds.spread),
            "rounds": len(self.speeds.wall),
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }


def export_timing(
    candidate: Candidate, bundle: Bundle, seconds: float, threads: int | None
) -> Timing:
    """Time the first engine and eager in turns, and each node of the engine; nothing of that where
    it does not run here, is large, or takes too long.

    Args:
        bundle: the engine's, about to be published.
        seconds: that the export took.
        threads: within an op, of both.
    """
    config = candidate.config
    if not config.runs_here or config.device != "cpu":
        return Timing()
    room = min(MOST, SHARE * seconds)
    record = bundle.manifest.engines[0]
    if sum(bundle.path(name).stat().st_size for name in candidate.artifacts[0].files) > LARGEST:
        return Timing()
    session, speed = session_class(record.target), None
    try:
        opened = session.open(bundle, record, config.providers, threads)
        with Engine(bundle, record, opened) as engine, torch_threads(threads):
            feeds = feeds_of(engine, candidate.reference.cases[0])
            shapes = {name: array.shape for name, array in feeds.items()}
            start = time.perf_counter()
            engine.run(feeds)
            once = time.perf_counter() - start
            source, wanted = candidate.model.source, candidate.model.wanted
            given = source, wanted, [feeds]
            eager = peer("eager", *given, device="cpu", dtype=torch.float32, threads=threads)
            start = time.perf_counter()
            eager.call()
            if (time.perf_counter() - start) * (FEWEST + WARM_UPS) <= room:
                calls = {"eager": eager.call, "engine": of_engine(engine, [feeds]).call}
                found = interleaved(calls, rounds=2 * FEWEST, seconds=room)
                speed = ExportSpeed(found["engine"].over(found["eager"]), shapes)
        if once * PROFILED_RUNS > room:
            return Timing(speed)
        times = session.node_times(bundle, record, config.providers, threads, feeds, room / 4)
    except EnginecastError:  # it is published all the same
        return Timing()
    if times is None:
        return Timing(speed)
    modules = candidate.artifacts[0].modules
    spent_in: dict[tuple[str, str], list[float]] = {}
    for name, op, spent in times.nodes:
        # ONNX Runtime calls what it fuses by the first of the nodes: "node_linear/MatMulAddFusion".
        module = modules.get(name, modules.get(name.partition("/")[0], ""))
        spent_in.setdefault((module, op), []).append(spent)
    layers = tuple(
        LayerTime(module, op, len(spent), sum(spent)) for (module, op), spent in spent_in.items()
    )
    return Timing(speed, Profile(engine.provider, times.runs, shapes, layers))
