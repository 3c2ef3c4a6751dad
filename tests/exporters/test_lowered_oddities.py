"""Forms that torch takes and that ONNX, its exporter or ONNX Runtime treats in another way."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowering import lower, run
from programs import Function, captured, rewritten
from torch import Tensor, nn
from torch.nn import functional as F


def pad_before_pool(x: Tensor) -> Tensor:
    """Zeros take part in the maximum; ONNX Runtime's own padding of a pool does not."""
    return F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)


def inverted_mask(x: Tensor) -> Tensor:
    return 1.0 - (x > 0).long()


def unbiased_convolution(x: Tensor) -> Tensor:
    """torchlib's form adds a bias of two dims where there is none."""
    return F.conv3d(x.unsqueeze(1), x[:1, :2, :2, :2].unsqueeze(0), stride=(1, 2, 1), padding=1)


def far_places(x: Tensor) -> Tensor:
    """ONNX Runtime reads pixels at places beyond the largest integer."""
    grid = torch.cat([x[:, 0], 1e17 * x[:, 1], 1e12 * x[:, 2]], -1).unflatten(-1, (12, 2))
    options = [
        (way, padding, corners)
        for way in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border")
        for corners in (False, True)
    ]
    return torch.stack([F.grid_sample(x, grid, *option) for option in options])


FORMS: list[Callable[[Tensor], Tensor]] = [
    pad_before_pool,
    inverted_mask,
    unbiased_convolution,
    far_places,
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_engine_computes_what_torch_does(
    form: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    x = torch.randn(2, 5, 6, 8) - 4.0  # mostly negative: zeros beside it are the largest
    program, _ = rewritten(captured(Function(form), x), "canonicalize")
    lower(program, tmp_path)
    torch.testing.assert_close(run(tmp_path, x)[0], form(x), rtol=1e-5, atol=1e-5)


class Turned(nn.Module):
    """Rotary positions of a complex table, as QwenImage has them."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(9, 4), torch.randn(9, 4)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.table[: x.shape[1]].unsqueeze(1)).flatten(3)


def test_a_table_of_complex_numbers_with_a_new_dim(tmp_path: Path) -> None:
    """Legalizing makes an unsqueeze of pairs of it, which is a weight that is stored, too."""
    module, x = Turned(), torch.randn(2, 5, 6, 8)
    lower(captured(module, x), tmp_path)
    torch.testing.assert_close(run(tmp_path, x)[0], module(x), rtol=1e-5, atol=1e-5)


def test_rows_of_complex_numbers_are_padded_to_one_length(tmp_path: Path) -> None:
    def padded(x: Tensor) -> Tensor:
        one, other = torch.view_as_complex(x).unbind()
        rows = nn.utils.rnn.pad_sequence([one, other[:3]], batch_first=True, padding_value=2.0)
        return torch.view_as_real(rows)

    x = torch.randn(2, 5, 4, 2)
    lower(captured(Function(padded), x), tmp_path)
    torch.testing.assert_close(run(tmp_path, x)[0], padded(x), rtol=1e-5, atol=1e-5)
