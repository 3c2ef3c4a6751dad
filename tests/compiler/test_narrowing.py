"""Dimensions that nobody asked for are narrowed to what the model's code takes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import enginecast
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.given import apply_dynamic, parse_dynamic
from enginecast.capture.inputs.narrowing import narrow
from enginecast.capture.inputs.specs import DimSpec, InputSpec, ranges_of
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.captured import Captured, capture
from enginecast.errors import CaptureError, VerificationError

pytestmark = pytest.mark.all_sizes

ROWS = DimSpec("rows", 5, 1, 40)
SPECS = (InputSpec("x", "tensor", torch.float32, (DimSpec("batch", 3, 1, 9), ROWS)),)
GUARD = (
    "Constraints violated (rows)! For more information, run with TORCH_LOGS.\n"
    "  - Not all values of rows = L['x'].size()[1] in the specified range rows <= 40 "
    "satisfy the generated guard {}.\n\nThe error above occurred"
)


class Switch(nn.Module):
    """Takes another path at eight rows and more."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[1] < 8 else x - 1


class Loop(nn.Module):
    """Unrolls a loop over the rows, as a recurrence does."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for row in range(x.shape[1]):
            state = torch.tanh(state + x[:, row])
        return state


def captured(module: nn.Module, *options: str) -> Captured:
    specs = apply_dynamic(SPECS, [parse_dynamic(text) for text in options])
    example = sample(specs, example_sizes(specs), 0)
    # Not rewritten, which would make all sizes possible.
    return capture(FactorySource("small", module, {}), specs, example, fallback="none")


def test_a_range_is_cut_where_the_code_takes_another_path() -> None:
    found = captured(Switch())
    assert ranges_of(found.inputs)["rows"] == (1, 7)
    assert "rows takes 1..7, not 1..40" in found.notes[0]


def test_a_dimension_that_a_loop_runs_over_is_fixed() -> None:
    found = captured(Loop())
    assert set(ranges_of(found.inputs)) == {"batch"}
    assert found.inputs[0].dims[1] == DimSpec.static(5)
    assert "rows is fixed at 5" in found.notes[0]
    assert "--dynamic x:1=K" in found.notes[0]


class Halved(nn.Module):
    """Takes an even number of rows alone."""

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool1d(x[:, None], 2)
        return F.interpolate(pooled, scale_factor=2.0)[:, 0] + x


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1] // 2, 2).sum(-1)


@pytest.mark.parametrize("make", [Halved, Pairs])
def test_sizes_at_which_the_code_raises_are_left_out_in_steps(make: type[nn.Module]) -> None:
    found = captured(make())
    assert found.inputs[0].dims[1].sizes == range(2, 41, 2)
    assert "rows takes 2..40/2, not 1..40" in found.notes[0]


@pytest.mark.parametrize("make", [Halved])
def test_a_range_that_was_asked_for_is_refused_with_steps_that_fit(make: type[nn.Module]) -> None:
    with pytest.raises(CaptureError) as refused:
        captured(make(), "x:1=1..40")
    assert "--dynamic x:1=2..40/2" in str(refused.value)


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("L['x'].size()[1] != 8", (1, 7)),
        ("((-1) + L['x'].size()[1]) != 1", (3, 40)),
        ("L['x'].size()[1] == (12 + ((-1)*max(0, 12 + ((-1)*L['x'].size()[1]))))", (1, 12)),
        ("Mod(L['x'].size()[1], 5) == 0", (5, 40)),
        ("torch.sym_max(2, torch.sym_min(9, L['x'].size()[1])) < 9", (1, 8)),  # torch 2.14 writes
        ("L['x'].size()[0]*L['x'].size()[1] != 8", (5, 5)),
        ("Strange(L['x'].size()[1])", (5, 5)),
    ],
)
def test_guards_are_read(guard: str, expected: tuple[int, int]) -> None:
    found = narrow(SPECS, GUARD.format(guard))
    assert found is not None
    dim = found.specs[0].dims[1]
    assert (dim.minimum, dim.maximum) == expected
    assert dim.name == (None if expected[0] == expected[1] else "rows")


class TellsSizes(nn.Module):
    """A size that varies is not an int."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3 if isinstance(x.shape[0], int) else x * 2


def test_code_that_tells_a_size_that_varies_is_rejected(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 8)
    with pytest.raises(VerificationError, match=r"test_narrowing\.py:"):
        enginecast.compile(TellsSizes(), tmp_path / "b", example={"x": x})
