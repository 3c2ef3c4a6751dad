"""Outputs that depend on nothing but sizes, and outputs of zeros."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import Function, captured
from torch import Tensor, nn

from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest
from enginecast.verification.eager.make_reference import shape_only_outputs

X = torch.arange(1.0, 13.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("function", "is_fixed"),
    [
        (lambda x: torch.zeros(x.shape[0] * 2), True),
        (lambda x: torch.zeros(x.shape) + 0, True),
        (lambda x: x * 0, False),
        (lambda x: torch.zeros_like(x) + x.relu() - x.relu(), False),
    ],
)
def test_only_what_no_value_reaches(function: Callable[[Tensor], Tensor], is_fixed: bool) -> None:
    program = captured(Function(function), X)
    assert shape_only_outputs(program, ("out",)) == (
        frozenset({"out"}) if is_fixed else frozenset()
    )


class Zeros(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[0] * 2)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0


@pytest.mark.parametrize("make", [Zeros, Nothing])
def test_zeros_are_verified(make: type[nn.Module], tmp_path: Path) -> None:
    done = export(ExportRequest(make(), tmp_path / "bundle", example={"x": X}, threads=1))
    assert done.report.verdict.outcome == "verified", done.report.verdict.reasons
