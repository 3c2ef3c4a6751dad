"""Engines under load and under wrong inputs."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bundles
import numpy as np

from enginecast.errors import EnginecastError
from enginecast.runtime.load import load
from faults.campaign import Campaign, Sizes, Tally, environment

THREADS = 64
SIZES = {0: "batch:1..4", 1: "sequence:2..6"}
"""Those of the tiny engine."""
MEGABYTES = 8
"""By how much memory may grow: far less than a leak of 100 bytes a run, or of a session a load."""


def threads(count: int, folder: Path) -> Tally:
    """Run one engine from 64 threads at once, each with inputs of its own."""
    tally, done = Tally(), [0] * THREADS
    differing: list[str] = []
    with load(bundles.make_bundle(folder / "bundle")) as engine:
        shapes = [(1 + number % 4, 2 + number % 5) for number in range(THREADS)]
        feeds = [bundles.feeds(*shape) for shape in shapes]
        for number, one in enumerate(feeds):
            one["input_ids"] = (one["input_ids"] + number) % bundles.VOCABULARY
        serial = [engine.run(one)["hidden"].tobytes() for one in feeds]
        assert len(set(serial)) > THREADS // 2
        together = threading.Barrier(THREADS)

        def work(number: int) -> None:
            together.wait()
            for turn in range(-(-count // THREADS)):
                try:
                    result = engine.run(feeds[number])["hidden"].tobytes()
                except Exception as error:  # of whatever kind: the campaign counts it
                    differing.append(f"thread {number}, run {turn}: {error}")
                    return
                if result != serial[number]:
                    differing.append(f"thread {number}, run {turn}: other bits than alone")
                    return
                done[number] += 1

        workers = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for one_defect in differing:
        tally.defect(one_defect)
    tally.injected += sum(done)
    tally.fired += sum(done)
    tally.outcomes["bit-equal to serial"] += sum(done)
    return tally


LONG = """
import sys
import bundles
from enginecast.runtime.load import load

def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))

root, loads, runs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
feeds = bundles.feeds()
for name, count in (("loads", loads), ("runs", runs)):
    if name == "runs":
        engine = load(root)
    warm = private()
    for turn in range(count):
        if turn == count // 5:
            warm = private()  # by then caches and arenas have their sizes
        if name == "loads":
            with load(root) as one:
                one.run(feeds)
        else:
            engine.run(feeds)
    print(name, count, private() - warm, flush=True)
"""


def long_use(count: int, folder: Path) -> Tally:
    """Load and run over and over; one load for a hundred runs."""
    tally = Tally()
    loads = max(count // 101, 1)
    root = bundles.make_bundle(folder / "bundle")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LONG, str(root), str(loads), str(count - loads)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tally.defect(f"the process ended with {done.returncode}: {done.stderr[-500:]}")
    for line in done.stdout.splitlines():
        name, number, kilobytes = line.split()
        if int(kilobytes) > MEGABYTES << 10:
            tally.defect(f"{number} {name} took {kilobytes} kB more at the end than at a fifth")
        tally.injected += int(number)
        tally.fired += int(number)
        tally.outcomes[f"{name} in flat memory"] += int(number)
    return tally


def wrong_feeds() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What is wrong, what the error has to name, and the feeds."""
    for name in ("input_ids", "attention_mask"):
        right = bundles.feeds()
        values: dict[str, Any] = {}
        for shape in ((), (3,), (2, 3, 1), (1, 2, 3), (0, 3), (2, 0), (0, 0), (5, 3), (2, 7)):
            values[f"of shape {shape}"] = np.ones(shape, np.int64)
        for shape in ((2, 1), (9, 9), (1, 3), (3, 3), (2, 4), (1 << 20, 3)):
            values[f"of shape {shape}"] = np.ones(shape, np.int64)
        for dtype in ("float32", "float64", "float16", "complex64", "object", "U3", "S3"):
            values[f"of dtype {dtype}"] = right[name].astype(dtype)
        for dtype in ("datetime64[s]", "timedelta64[s]", "V8"):
            values[f"of dtype {dtype}"] = right[name].view(dtype)
        ragged: list[list[int]] = [[1, 2, 3], [1]]
        others: tuple[Any, ...] = (None, "red", b"red", {"a": 1}, object(), {1, 2}, ragged, 1.5)
        for value in others:
            values[f"a {type(value).__name__} {str(value)[:20]}"] = value
        for what, value in values.items():
            yield f"{name}: {what}", name, right | {name: value}
        yield f"{name}: left out", name, {key: one for key, one in right.items() if key != name}
        for extra in (name.upper(), f"{name} ", f"{name}_2", ""):
            yield f"an input {extra!r} more", extra, right | {extra: right[name]}
    for number in (-1, bundles.VOCABULARY, 1 << 40, -(1 << 63), (1 << 63) - 1):
        ids = bundles.feeds()["input_ids"]
        ids[1, 2] = number
        yield f"input_ids: a value {number}", "input_ids", bundles.feeds() | {"input_ids": ids}


def _exported(folder: Path, target: str) -> Path:
    """An engine of a target, with the inputs of the tiny one."""
    from torch import Tensor, from_numpy, nn

    from enginecast.compiler.export.session import export
    from enginecast.compiler.request import ExportRequest, ModelOptions

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding.from_pretrained(from_numpy(bundles.table()))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            return {"hidden": self.table(input_ids) * attention_mask.unsqueeze(-1).float()}

    ranges = [f"{name}:{dim}={size}" for name in bundles.feeds() for dim, size in SIZES.items()]
    example = {name: from_numpy(values) for name, values in bundles.feeds().items()}
    options = ModelOptions(dynamic=ranges)
    done = export(ExportRequest(Rows(), folder, target, example=example, options=options))
    assert done.bundle is not None, done.report.verdict.reasons
    return folder


def inputs(count: int, folder: Path, target: str = "onnxruntime") -> Tally:
    """Feed what does not fit, and run right feeds after each."""
    tally, feeds = Tally(), bundles.feeds()
    place = folder / "bundle"
    made = bundles.make_bundle(place) if target == "onnxruntime" else _exported(place, target)
    with load(made, allow_code=True) as engine:
        right = engine.run(feeds)["hidden"].tobytes()
        for what, name, wrong in wrong_feeds():
            if tally.injected >= count:
                break
            try:
                engine.run(wrong)
                tally.defect(f"{what}: it ran")
                continue
            except EnginecastError as error:
                named = name in error.message
                if not named:
                    tally.defect(f"{what}: the error does not name it: {error.message}")
                    continue
            except Exception as error:  # not ours: harm, which the campaign counts
                tally.defect(f"{what}: {type(error).__name__}: {error}")
                continue
            if engine.run(feeds)["hidden"].tobytes() != right:
                tally.defect(f"{what}: the next run differs")
            else:
                tally.add("refused by name")
    return tally


CAMPAIGNS = (
    Campaign(
        "wrong inputs",
        "An input of a wrong name, type, dtype, shape or value is refused by name, and the next run"
        " is right.",
        Sizes(quick=60, full=len([*wrong_feeds()])),
        inputs,
    ),
    Campaign(
        "wrong inputs, TorchScript",
        "The same of a TorchScript engine.",
        Sizes(quick=60, full=len([*wrong_feeds()])),
        partial(inputs, target="torchscript"),
    ),
    Campaign(
        "wrong inputs, AOTInductor",
        "The same of an AOTInductor engine.",
        Sizes(quick=0, full=len([*wrong_feeds()])),
        partial(inputs, target="aotinductor"),
    ),
    Campaign(
        "wrong inputs, OpenVINO",
        "The same of an OpenVINO engine.",
        Sizes(quick=0, full=len([*wrong_feeds()])),
        partial(inputs, target="openvino"),
        lacks=lambda: "" if find_spec("openvino") else "OpenVINO is not installed",
    ),
    Campaign(
        "threads",
        "Runs from 64 threads at once give the bits of runs one after the other.",
        Sizes(quick=THREADS * 50, full=THREADS * 25_000),
        threads,
    ),
    Campaign(
        "long use",
        "Memory stays flat over 1,000 loads and 100,000 runs.",
        Sizes(quick=2_020, full=101_000),
        long_use,
    ),
)
