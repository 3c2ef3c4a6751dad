"""A residual stream with outliers: sums that differ by little are still different values."""

import pytest
import torch
from torch import Tensor, nn

from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build
from enginecast.verification.program.observer import Observer

WIDTH = 16
OUTLIER = 1e5


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return result


class Layer(nn.Module):
    """Adds little to a stream that one channel dominates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = x + self.linear(self.norm(x))
        second: Tensor = self.linear(self.norm(first))
        return first + second


class Stream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.last = Norm()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.last(x)
        return result


class Hidden(Stream):
    """Gives the stream before its last layer, too, as pipelines ask of text encoders."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.layers[0](x)
        return self.last(self.layers[1](hidden)), hidden


class Named:
    name = "outlier"

    def __init__(self, x: Tensor) -> None:
        self.inputs = {"x": x}


@pytest.mark.parametrize("kind", [Stream, Hidden])
def test_fusing_residual_sums_of_a_stream_with_outliers_breaks_no_promise(
    kind: type[Stream],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, WIDTH)
    x[..., 2] = OUTLIER
    exported = program_of(kind().eval(), x)
    observer = Observer(exported, [Named(x)])
    run_pipeline(
        build("canonicalize,fuse-rms-norm,fuse-skip-norm"), exported, PassContext(), [observer]
    )
    assert [check.failure for check in observer.checks] == ["", "", ""]
    assert observer.checks[-1].rewritten == 4
    # A sum is no longer what leaves a layer: another value that does is not compared with it.
    assert "layers.1" in observer.checks[-1].moved
    assert "layers" not in observer.checks[-1].modules


def program_of(module: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module.requires_grad_(False), (x,))
