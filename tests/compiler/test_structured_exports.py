"""Branches, loops and sizes that values decide, from a module to a verified engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structured_models import MODELS, OneWay, Remembers, Structured, tokens
from torch import Tensor, nn
from torch._higher_order_ops.map import map as torch_map

import enginecast
from enginecast.compiler.export.session import export
from enginecast.compiler.publication.bundle import Export
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import CaptureError, VerificationError

OFTEN = {("Branches", "fp16"), ("Counted", "fp32")}
"""What a default run exports; the others are slow together."""


def made(case: Structured, folder: Path, precision: str = "fp32") -> Export:
    module, example = case.make()
    return export(ExportRequest(module, folder / "bundle", precision=precision, example=example))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            name,
            precision,
            marks=[] if (name, precision) in OFTEN else pytest.mark.slow,
            id=f"{name}-{precision}",
        )
        for name in MODELS
        for precision in ("fp32", "fp16", "bf16")
    ],
)
def test_engine_agrees_with_eager(name: str, precision: str, tmp_path: Path) -> None:
    case = MODELS[name]
    done = made(case, tmp_path, precision)
    verdict = done.report.verdict
    expected = "verified" if precision == "fp32" else "verified-by-emulation"
    assert verdict.outcome == expected, verdict.reasons
    assert done.ops.get(case.op, 0) >= 1
    if case.op in ("If", "Loop"):
        assert any("every path of the program verified" in note for note in done.report.notes)


def test_engine_takes_both_paths_and_sizes_of_its_own(tmp_path: Path) -> None:
    module, example = MODELS["OwnLength"].make()
    enginecast.compile(module, tmp_path / "bundle", example=example)
    x = example["x"]
    with enginecast.load(tmp_path / "bundle") as engine:
        [output] = engine.outputs
        assert output.shape == ("batch", "output_0_1", 8)
        for inputs, length in ((x.abs(), 2), (-x.abs(), 3)):
            found = torch.from_numpy(engine.run({"x": inputs.numpy()})["output_0"])
            assert found.shape == (3, length, 8)
            torch.testing.assert_close(found, module.eval()(inputs))


@pytest.mark.slow
def test_fusions_reach_into_a_branch(tmp_path: Path) -> None:
    done = made(MODELS["NormInBranch"], tmp_path)
    assert done.ops["RMSNormalization"] == 2
    assert done.ops["Gelu"] == 1
    [norms] = [fusion for fusion in done.report.fusions if fusion.kind == "rms-norm"]
    assert (norms.expected, norms.program, norms.engine, norms.missing) == (2, 2, 2, ())
    checked = [place for check in done.report.passes for place in check.modules]
    assert any(place.endswith("cond[true]") for place in checked)
    assert any(place.endswith("cond[false]") for place in checked)


@pytest.mark.slow
def test_a_size_that_values_decide_has_a_name_without_a_range(tmp_path: Path) -> None:
    done = made(MODELS["Cut"], tmp_path)
    assert done.bundle is not None
    manifest = done.bundle.manifest
    shapes = {output.name: output.shape for output in manifest.outputs}
    assert shapes == {"hidden": ("batch", "hidden_1", 8), "twice": ("batch", "2*hidden_1", 8)}
    assert set(manifest.symbols) == {"batch"}
    assert [note for note in done.report.notes if "is not in the engine" in note] != []


def test_a_path_that_no_input_takes_is_a_rejection(tmp_path: Path) -> None:
    done = export(ExportRequest(OneWay(), tmp_path / "bundle", example=tokens()))
    assert done.bundle is None
    [reason] = done.report.verdict.reasons
    assert reason.startswith("unverified branch: structured_models.py:")
    assert reason.endswith("cond never took the false path")


@pytest.mark.slow
def test_a_path_that_no_input_takes_may_be_allowed(tmp_path: Path) -> None:
    options = ModelOptions(allow_unverified_branches=True)
    done = export(ExportRequest(OneWay(), tmp_path / "bundle", options=options, example=tokens()))
    assert done.report.verdict.outcome == "verified"
    assert any("unverified branch" in note for note in done.report.notes)


def test_a_write_to_state_within_a_branch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"add_.*changes table at .*structured_models\.py"):
        export(ExportRequest(Remembers(), tmp_path / "bundle", example=tokens()))


def test_an_assertion_that_fails_names_its_line(tmp_path: Path) -> None:
    module, example = MODELS["Guarded"].make()
    with pytest.raises(
        VerificationError, match=r"case .*the assertion at structured_models\.py:\d+ fails"
    ):
        export(ExportRequest(module, tmp_path / "bundle", example={"x": example["x"] * 1000}))


def _double(row: Any, *_: Any) -> Any:
    return row * 2.0


class Mapped(nn.Module):
    """An op that runs a graph, and that ONNX has no form for."""

    def forward(self, x: Tensor) -> Any:
        return torch_map(_double, x)


def test_another_op_with_a_graph_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"map.* at test_structured_exports\.py:\d+ is a str"):
        export(ExportRequest(Mapped(), tmp_path / "bundle", example=tokens()))
