"""How an engine that was just exported compares with eager here: a few calls, in little time."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from enginecast.bench.contenders import EngineContender, peer
from enginecast.bench.timing import FEWEST, WARM_UPS, Times, interleaved
from enginecast.compiler.publish import Export
from enginecast.errors import EnginecastError
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.runtime.load import load
from enginecast.verify.engine import feeds_of
from enginecast.verify.reference import REFERENCE_NAME, read_reference

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
    """Of the inputs: those of the bundle's first case."""

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


def export_speed(done: Export, seconds: float, threads: int | None) -> ExportSpeed | None:
    """Time the engine and eager in turns; None where it does not run here, or takes too long.

    Args:
        seconds: that the export took.
        threads: within an op, of both.
    """
    config = done.candidate.config
    if done.bundle is None or not config.runs_here or config.device != "cpu":
        return None
    room = min(MOST, SHARE * seconds)
    if done.size > LARGEST:
        return None
    try:
        with (
            load(
                done.folder,
                require="verified-by-emulation",
                allow_code=True,
                threads=threads,
                check="size",
                tuned=False,
            ) as engine,
            torch_threads(threads),
        ):
            case = read_reference(done.folder / REFERENCE_NAME).cases[0]
            feeds = [feeds_of(engine, case)]
            model = done.candidate.model
            given = model.source, model.wanted, feeds
            eager = peer("eager", *given, device="cpu", dtype=torch.float32, threads=threads)
            start = time.perf_counter()
            eager.call()
            if (time.perf_counter() - start) * (FEWEST + WARM_UPS) > room:
                return None
            calls = {"eager": eager.call, "engine": EngineContender(engine, feeds).call}
            found = interleaved(calls, rounds=2 * FEWEST, seconds=room)
    except EnginecastError:  # it was published all the same
        return None
    shapes = {name: array.shape for name, array in feeds[0].items()}
    return ExportSpeed(found["engine"].over(found["eager"]), shapes)
