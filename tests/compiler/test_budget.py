"""Too little disk or memory is said before the work starts, with the figures."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from exports import Exports, cast

from enginecast.compiler import budget
from enginecast.compiler.budget import IMPORTED, estimate
from enginecast.compiler.request import ExportRequest

BILLION = 1_000_000_000
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("elements", "precision", "weights", "why"),
    [
        # 16-bit weights are widened while they are read, and an engine for a GPU is not run here.
        ({BF16: BILLION}, "bf16", 0, "eager in bf16"),
        # fp32 weights are rounded for the eager model in bf16.
        ({FP32: BILLION}, "bf16", 2 * BILLION, "eager in bf16"),
        # Two dtypes are loaded as transformers loads them.
        ({FP16: BILLION, FP32: BILLION}, "bf16", 8 * BILLION, "eager in fp32"),
        ({FP32: BILLION}, "fp32", 3 * BILLION, "running the engine here"),
        ({FP16: BILLION}, "fp16", 2 * BILLION, "running the engine here"),
    ],
)
def test_what_an_export_takes_at_least(
    elements: dict[torch.dtype, int], precision: str, weights: int, why: str
) -> None:
    found = estimate(
        elements, ExportRequest("model", precision=precision).resolve(), in_memory=False
    )
    assert found.memory == IMPORTED + weights
    assert found.why == why
    disk = {"fp32": 4, "fp16": 2, "bf16": 2}[precision] * sum(elements.values())
    assert disk < found.disk < disk + BILLION / 10


def test_too_little_memory_is_said_at_once(
    exports: Exports,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(budget, "available", lambda: 50_000_000)
    monkeypatch.setattr(budget, "anonymous", lambda: 0)
    ran = cast(capsys, "export", exports.model("t5"), "-o", tmp_path / "out")
    assert ran.code == 3
    assert "exporting t5 takes at least 0.6 GB of memory" in ran.err
    assert "running the engine here; 0.1 GB are free" in " ".join(ran.err.split())
    assert "--device cuda" in ran.err
    assert "capture" not in ran.err
    assert list(tmp_path.iterdir()) == []


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_too_little_disk_is_said_at_once(
    exports: Exports,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 10**6, 10**6))
    ran = cast(capsys, "export", exports.model("t5"), "-o", tmp_path / "out")
    assert ran.code == 3
    assert "MB free on this disk, got 1.0 MB" in " ".join(ran.err.split())
    assert "capture" not in ran.err
    assert list(tmp_path.iterdir()) == []


def test_each_engine_of_a_bundle_takes_disk() -> None:
    """A plan and the network that it is built from, and the engine beside it."""
    alone = ExportRequest("model", "", "tensorrt", "fp16").resolve()
    both = ExportRequest("model", "", "tensorrt", "fp16", also=("onnxruntime",)).resolve()
    disks = [estimate({FP16: BILLION}, plan, in_memory=False).disk for plan in (alone, both)]
    assert [round(disk / BILLION) for disk in disks] == [4, 6]
    assert estimate({FP16: BILLION}, alone, in_memory=False).why != "running the engine here"
