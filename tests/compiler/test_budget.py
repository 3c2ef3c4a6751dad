"""Too little disk or memory is said before the work starts, with the figures."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from exports import Exports, cast
from safetensors.torch import load_file, save_file
from tiny_components import save

from enginecast.capture.sources.huggingface.diffusers_folder import STEM
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.weights.widened import WidenedWeight
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


@pytest.mark.parametrize(
    ("precision", "weights"), [("fp32", 3 * 1.1e9), ("bf16", 2 * 0.1e9), ("fp16", 2 * 1.1e9)]
)
def test_a_component_maps_weights_of_several_dtypes(
    precision: str, weights: float, tmp_path: Path
) -> None:
    """Eager in fp32 reads all of them from their file; in 16 bits, those of that dtype."""
    request = ExportRequest("model", precision=precision).resolve()
    elements = {BF16: BILLION, FP32: BILLION // 10}
    mapped = estimate(elements, request, in_memory=False, maps_mixed=True)
    assert mapped.memory == IMPORTED + weights
    assert mapped.memory <= estimate(elements, request, in_memory=False).memory
    folder = save("dit", tmp_path / "dit")
    file = folder / f"{STEM}.safetensors"
    stored = load_file(file)
    half = {name: t.bfloat16() if t.ndim > 1 else t for name, t in stored.items()}
    save_file(half, file, metadata={"format": "pt"})
    source = open_source(str(folder))
    assert source.maps_mixed
    assert set(source.weight_elements()) == {BF16, FP32}
    eager = source.eager().state_dict()
    kinds = {name: isinstance(tensor, WidenedWeight) for name, tensor in eager.items()}
    assert kinds == {name: tensor.dtype == BF16 for name, tensor in half.items()}


def test_a_torchscript_export_runs_the_model_in_fp64() -> None:
    found = estimate(
        {FP32: BILLION}, ExportRequest("model", "", "torchscript").resolve(), in_memory=False
    )
    assert found.memory == IMPORTED + 8 * BILLION
    assert found.why == "eager in fp64"


def test_weights_that_are_drawn_are_in_memory() -> None:
    plan = ExportRequest("model", precision="fp32").resolve()
    mapped = estimate({FP32: BILLION}, plan, in_memory=False)
    drawn = estimate({FP32: BILLION}, plan, in_memory=True)
    assert drawn.memory - mapped.memory == 4 * BILLION


def test_elements_are_those_of_the_model(exports: Exports) -> None:
    source = open_source(exports.model("t5-4-wo-in-fp32"))
    weights = {t.data_ptr(): t for t in source.weights().values()}.values()
    found = source.weight_elements()
    assert set(found) == {FP16, FP32}
    assert found[FP32] == sum(t.numel() for t in weights if t.dtype == FP32)
    assert found[FP16] == sum(t.numel() for t in weights if t.dtype == FP16)


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
