"""transpose-images: tokens and images beside a convolution, in one transpose of four dims."""

from collections.abc import Callable

import golden
import pytest
import torch
from programs import Function, captured, count, ir_diff, outputs, reasons, rewritten
from torch import Tensor, nn
from torch.nn.functional import conv2d

WEIGHT = torch.randn(6, 6, 3, 3, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A convolution over tokens, as in a Segformer's feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1, groups=6)

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).view(x.shape[0], 6, 4, 5)
        found: Tensor = self.conv(image).flatten(2).transpose(1, 2)
        return found


def test_tokens_become_an_image_and_tokens_again_in_one_step_each() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 20, 6)
    program = captured(Block(), x)
    after, sites = rewritten(program, "transpose-images")
    assert [site.rewritten for site in sites] == [True, True]
    assert count(after, "transpose.int") == 0
    assert count(after, "permute.default") == 2
    golden.check("transpose_images.diff", ir_diff(program, after))
    torch.testing.assert_close(outputs(after, x), outputs(program, x))


def _by_permute(x: Tensor) -> Tensor:
    found = conv2d(x.permute(0, 2, 1).unflatten(2, (4, 5)), WEIGHT)
    return found.reshape(x.shape[0], 6, -1).permute(0, 2, 1)


def test_permutes_and_sizes_that_follow_are_taken_too() -> None:
    x = torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(1))
    program = captured(Function(_by_permute), x)
    after, sites = rewritten(program, "transpose-images")
    assert [site.rewritten for site in sites] == [True, True]
    torch.testing.assert_close(outputs(after, x), outputs(program, x))


def _read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    swapped = x.transpose(1, 2)
    return conv2d(swapped.reshape(2, 6, 4, 5), WEIGHT), swapped.exp()


def _other_channels(x: Tensor) -> Tensor:
    return conv2d(x.transpose(1, 2).reshape(1, 6, 8, 5), WEIGHT)


def _no_convolution(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(2, 6, 4, 5).exp()


@pytest.mark.parametrize(
    ("function", "reason"),
    [(_read_twice, "read elsewhere as well"), (_other_channels, ""), (_no_convolution, "")],
)
def test_what_is_left_alone(function: Callable[..., Tensor], reason: str) -> None:
    x = torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(1))
    program = captured(Function(function), x)
    after, sites = rewritten(program, "transpose-images")
    assert count(after, "permute.default") == 0
    assert bool(reason) == bool(sites)
    assert all(reason in found for found in reasons(sites))
    torch.testing.assert_close(outputs(after, x), outputs(program, x), rtol=0, atol=0)
