"""How an engine that is about to be published compares with eager here: a few calls."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from enginecast.bench.contenders import EngineContender, peer
from enginecast.bench.timing import FEWEST, WARM_UPS, Times, interleaved
from enginecast.compiler.publish import Candidate
from enginecast.errors import EnginecastError
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.registry import session_class
from enginecast.verify.engine import feeds_of

SHARE = 0.1
"""Part of the export's time that it may take."""
MOST = 1.0
"""Seconds that it may take."""
LARGEST = 1 << 30
"""Bytes of an engine for which eager is not opened once more."""


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


def export_speed(
    candidate: Candidate, bundle: Bundle, seconds: float, threads: int | None
) -> ExportSpeed | None:
    """Time the first engine and eager in turns; None where it does not run here, or takes too long.

    Args:
        bundle: the engine's, about to be published.
        seconds: that the export took.
        threads: within an op, of both.
    """
    config = candidate.config
    if not config.runs_here or config.device != "cpu":
        return None
    room = min(MOST, SHARE * seconds)
    record = bundle.manifest.engines[0]
    if sum(bundle.path(name).stat().st_size for name in candidate.artifacts[0].files) > LARGEST:
        return None
    try:
        opened = session_class(record.target).open(bundle, record, config.providers, threads)
        with Engine(bundle, record, opened) as engine, torch_threads(threads):
            feeds = [feeds_of(engine, candidate.reference.cases[0])]
            model = candidate.model
            given = model.source, model.wanted, feeds
            eager = peer("eager", *given, device="cpu", dtype=torch.float32, threads=threads)
            start = time.perf_counter()
            eager.call()
            if (time.perf_counter() - start) * (FEWEST + WARM_UPS) > room:
                return None
            calls = {"eager": eager.call, "engine": EngineContender(engine, feeds).call}
            found = interleaved(calls, rounds=2 * FEWEST, seconds=room)
    except EnginecastError:  # it is published all the same
        return None
    shapes = {name: array.shape for name, array in feeds[0].items()}
    return ExportSpeed(found["engine"].over(found["eager"]), shapes)
