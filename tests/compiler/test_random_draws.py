"""Random numbers: a model that draws them is refused, whether or not two calls differ."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from enginecast.api import compile as export
from enginecast.errors import CaptureError

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Drawing(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def nearly_certain(x: Tensor) -> Tensor:
    """Draws the largest of each row, all but always."""
    return torch.multinomial((x * 1000).softmax(-1), 1)


def test_draws_that_two_calls_do_not_show_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"draws random numbers, by aten\.multinomial.* at test_ra"
    ):
        export(Drawing(nearly_certain), tmp_path / "engine", example={"x": X})


def unread(x: Tensor) -> Tensor:
    """As layer drop does in eval mode."""
    skips = torch.rand([]) < 0.1
    return x if isinstance(skips, int) else x * 2


def scaled(x: Tensor) -> Tensor:
    return x + torch.randn_like(x) * x.exp() * 0.0


def root(x: Tensor) -> Tensor:
    """Of zeros it is the same, but not of what is drawn: no number."""
    return x + torch.randn_like(x).sqrt() * 0.0


def test_draws_that_are_no_numbers_times_zero_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="random"):
        export(Drawing(root), tmp_path / "engine", example={"x": X})


@pytest.mark.parametrize(
    "forward",
    [
        unread,
        scaled,
        lambda x: functional.dropout(x, 0.5, training=False) + x,
    ],
)
def test_what_draws_nothing_is_published(
    forward: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    export(Drawing(forward).eval(), tmp_path / "engine", example={"x": X})
