"""Numbers in buffers, from which a model computes sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.answers.size_numbers import EXACT
from enginecast.capture.tracing.attempt import RefusedError
from enginecast.capture.tracing.captured import Captured, capture

LONGEST = 256


class PadsToFrames(nn.Module):
    """A convolution that pads what is left of a last frame, as audio codecs do."""

    stride: Tensor
    kernel: Tensor

    def __init__(self, stride: int = 5, kernel: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, kernel, stride)
        self.register_buffer("stride", torch.tensor(stride))
        self.register_buffer("kernel", torch.tensor(kernel), persistent=False)
        self.left = (self.kernel - self.stride) // 2 + 1

    def forward(self, signal: Tensor) -> Tensor:
        length = signal.shape[-1]
        frames = torch.ceil((length - self.kernel + self.left) / self.stride + 1).to(torch.int64)
        wanted = (frames - 1) * self.stride + self.kernel - self.left
        extra = wanted - length
        if length <= max(self.left, extra):
            behind: Any = (0, extra)
            signal = nn.functional.pad(signal, behind)
        sizes: Any = (self.left, extra)
        padded = nn.functional.pad(signal, sizes)
        y: Tensor = self.conv(padded[..., : padded.shape[-1] - extra + extra])
        return y * (2.0 if y.shape[-1] > 3 else 3.0)


def captured(module: nn.Module, longest: int = LONGEST) -> Captured:
    dims = (DimSpec.static(1), DimSpec.static(1), DimSpec("length", 64, 32, longest))
    example = {"signal": torch.ones(1, 1, 64)}
    source = FactorySource(type(module).__name__, module.eval(), example)
    spec = InputSpec("signal", "tensor", torch.float32, dims)
    return capture(source, (spec,), example, fallback="none")


class Writes(PadsToFrames):
    """Its buffer does not hold what it held before."""

    def forward(self, signal: Tensor) -> Tensor:
        self.stride.fill_(signal.shape[-1] // 8)
        return super().forward(signal)


def test_a_number_that_is_overwritten_is_not_known() -> None:
    with pytest.raises(RefusedError):
        captured(Writes())


class Halves(nn.Module):
    """A quotient whose fp32 value leads to another whole number in large sizes."""

    stride: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stride", torch.tensor(3))

    def forward(self, signal: Tensor) -> Tensor:
        frames = torch.ceil(signal.shape[-1] / self.stride + 1).to(torch.int64)
        sizes: Any = (0, frames)
        padded = nn.functional.pad(signal, sizes)
        return padded * 2 if padded.shape[-1] % 2 else padded


def test_a_quotient_is_followed_as_far_as_fp32_is_exact() -> None:
    assert captured(Halves(), longest=EXACT // 8).rungs[-1].name == "bake"
    wrong = torch.ceil(torch.tensor(3 * (EXACT // 2) + 1) / 3 + 1)
    assert int(wrong) != EXACT // 2 + 2  # what exact arithmetic gives
    with pytest.raises(RefusedError):
        captured(Halves(), longest=3 * EXACT)
