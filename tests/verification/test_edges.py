"""Unusual values: what an engine may do with them, and engines that are wrong there alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxscript import opset23 as op
from torch import Tensor, nn

from enginecast.api import compile as export
from enginecast.capture.inputs.examples import STYLES
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.prepare.program import prepare
from enginecast.compiler.prepare.reference import reference_of
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import VerificationError
from enginecast.exporters.onnx.ops.registry import FORMS
from enginecast.passes.presets import PrecisionName
from enginecast.verification.eager.captured import capture_failures
from enginecast.verification.edges import edge_failures, least_error
from enginecast.verification.metrics import Array
from enginecast.verification.reference import ReferenceCase

PLAIN = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
EDGES = [floats.edge for floats in STYLES.values() if floats.edge]


def failures(
    found: Array, plain: Array = PLAIN, exact: Array | None = None, name: str = "x"
) -> str:
    exact = plain.astype(np.float64) if exact is None else exact
    case = ReferenceCase(name, {}, {"y": plain}, {"y": exact})
    return "; ".join(edge_failures(case, {"y": found}))


def changed(index: tuple[int, int], value: float) -> Array:
    found = PLAIN.copy()
    found[index] = value
    return found


def test_what_agrees_with_eager_or_the_reference_passes() -> None:
    assert failures(PLAIN.copy()) == ""
    step = PLAIN.copy()
    step[1] += 1  # eager took the other side of a rounding
    assert failures(PLAIN.copy(), plain=step, exact=PLAIN.astype(np.float64)) == ""
    assert failures(step, plain=step, exact=PLAIN.astype(np.float64)) == ""


@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_row_may_be_off_by_the_limit(factor: float) -> None:
    found = PLAIN.copy()
    found[0] *= 1 + factor * least_error("fp32")
    assert ("worst row" in failures(found)) == (factor > 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_those_of_eager(value: float) -> None:
    assert "1 values are" in failures(changed((1, 2), value))
    assert failures(changed((1, 2), value), plain=changed((1, 2), value)) == ""
    assert "1 values are" in failures(changed((1, 2), 0.0), plain=changed((1, 2), value))
    # An intermediate that overflows in fp32 alone: an engine may do without.
    exact = PLAIN.astype(np.float64)
    assert failures(PLAIN.copy(), plain=changed((1, 2), value), exact=exact) == ""


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log1p(x)


class Pruned(nn.Module):
    """Keeps the tokens with the best scores, which are equal where they saturate."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = torch.sigmoid(self.score(x)).squeeze(-1).topk(4).indices
        return best, x.gather(1, best[..., None].expand(-1, -1, 8))


def test_an_engine_that_is_wrong_for_small_values_alone_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FORMS["onnxruntime-cpu"], torch.ops.aten.log1p.default)
    example = {"x": torch.rand(4, 8) + 0.5}
    with pytest.raises(VerificationError, match="case 'tiny values': its worst row"):
        export(Log(), tmp_path / "bundle", example=example)


def test_a_captured_program_that_is_another_model_at_the_edges_is_found() -> None:
    """As after a decision by value, such as `if x.max() < 50`, that was made while tracing."""
    source = open_source(nn.Softsign(), example={"input": torch.randn(4, 8)})
    made = prepare(source, ModelOptions(), Steps())
    reference = reference_of(made, "fp32", edges=True)
    assert list(capture_failures(made.plain, made.cases, reference)) == []
    edges = [
        replace(case, outputs={name: np.negative(array) for name, array in case.outputs.items()})
        if "large" in case.name
        else case
        for case in reference.edges
    ]
    changed = replace(reference, edges=tuple(edges))
    [found] = capture_failures(made.plain, made.cases, changed)
    assert "case 'large values': the captured program is not the model" in found


def test_eager_may_be_nan_where_the_engine_is(tmp_path: Path) -> None:
    bundle = export(Log(), tmp_path / "bundle", example={"x": torch.randn(4, 8)})
    [engine] = bundle.manifest.engines
    assert engine.verdict.outcome == "verified"
    assert set(EDGES) <= set(engine.verdict.cases)


def test_a_sort_may_choose_among_equal_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bundle = export(Pruned(), tmp_path / "bundle", example={"x": torch.randn(2, 12, 8)})
    verdict = bundle.manifest.engines[0].verdict
    assert verdict.outcome == "verified"
    assert "tiny values" in verdict.cases
    assert "large values" not in verdict.cases


class Scaled(nn.Module):
    """A linear layer, and values that an op of 16 bits rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.expm1(x) / (1 + x.abs()) + self.inner(x)
        return result


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_engines_in_16_bits_are_compared_at_the_edges(
    tmp_path: Path, precision: PrecisionName
) -> None:
    torch.manual_seed(0)
    bundle = export(
        Scaled(), tmp_path / "bundle", example={"x": torch.randn(4, 8)}, precision=precision
    )
    verdict = bundle.manifest.engines[0].verdict
    assert verdict.outcome == "verified-by-emulation"
    assert set(EDGES) <= set(verdict.cases)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_engine_in_16_bits_that_is_wrong_for_zeros_alone_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: PrecisionName
) -> None:
    right = FORMS["onnxruntime-cpu"][torch.ops.aten.expm1.default]

    def not_a_number(x: ir.Value) -> Any:  # of zero
        return op.Div(op.Mul(right(x), x), x)

    for forms in FORMS.values():
        monkeypatch.setitem(forms, torch.ops.aten.expm1.default, not_a_number)
    example = {"x": torch.randn(4, 8)}
    with pytest.raises(VerificationError, match="case 'zeros'"):
        export(Scaled(), tmp_path / "bundle", example=example, precision=precision)
