"""Branches, loops and sizes that values decide, from a module to a verified engine."""

from pathlib import Path

import pytest
import torch
from structured_models import MODELS, OneWay, Remembers, Structured, tokens

import enginecast
from enginecast.compiler.export.session import export
from enginecast.compiler.publication.bundle import Export
from enginecast.compiler.request import ExportRequest
from enginecast.errors import CaptureError, VerificationError

OFTEN = {("Branches", "fp16")}
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


def test_a_path_that_no_input_takes_is_a_rejection(tmp_path: Path) -> None:
    done = export(ExportRequest(OneWay(), tmp_path / "bundle", example=tokens()))
    assert done.bundle is None
    [reason] = done.report.verdict.reasons
    assert reason.startswith("unverified branch: structured_models.py:")
    assert reason.endswith("cond never took the false path")


def test_a_write_to_state_within_a_branch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"add_.*changes table at .*structured_models\.py"):
        export(ExportRequest(Remembers(), tmp_path / "bundle", example=tokens()))


def test_an_assertion_that_fails_names_its_line(tmp_path: Path) -> None:
    module, example = MODELS["Guarded"].make()
    with pytest.raises(
        VerificationError, match=r"case .*the assertion at structured_models\.py:\d+ fails"
    ):
        export(ExportRequest(module, tmp_path / "bundle", example={"x": example["x"] * 1000}))
