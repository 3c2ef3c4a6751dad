"""smooth-outliers: what it leaves alone and why, the exponents, and the rows that it looks at."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import TOKENS, calibrated, captured, reasons, rewritten, same_bits
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional

from enginecast.errors import PassError, SpecError
from enginecast.passes.ir.base import PassContext, Site
from enginecast.passes.smooth_outliers import sample_channels

ALWAYS = "smooth-outliers{alpha=0.6}"
WIDTH = 16


class Net(nn.Module):
    """A function of x and a module with norms and linears; two channels are large."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.norm, self.bare = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.rms = nn.RMSNorm(WIDTH, eps=1e-6)
        self.a, self.b = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.out, self.pair = nn.Linear(24, 8), nn.Linear(WIDTH, 48)
        with torch.no_grad():
            self.norm.weight[[3, 9]] = 20.0
            self.norm.bias.normal_()
            self.rms.weight[[3, 9]] = 20.0

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def program_of(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> ExportedProgram:
    torch.manual_seed(0)
    net = Net(function).eval().requires_grad_(False).to(dtype)
    return captured(net, torch.randn(4, 9, WIDTH, dtype=dtype), dynamic=TOKENS)


def smoothed(
    program: ExportedProgram, pipeline: str = ALWAYS, context: PassContext | None = None
) -> tuple[ExportedProgram, list[Site]]:
    return rewritten(program, pipeline, context or calibrated(program))


DONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "norm with a bias": lambda net, x: (net.a(net.norm(x)), net.b(net.norm(x))),
    "other dims swapped": lambda net, x: net.a(net.norm(x).transpose(0, 1)),
    "gate": lambda net, x: net.out(functional.silu(net.a(x)) * net.b(x)),
    "halves of one linear": lambda net, x: net.out(
        functional.gelu(net.pair(x).chunk(2, -1)[0]) * net.pair(x).chunk(2, -1)[1]
    ),
    "chained linears": lambda net, x: net.out(net.a(net.rms(x))),
}


@pytest.mark.parametrize("name", DONE)
def test_it_keeps_every_bit(name: str) -> None:
    before = program_of(DONE[name])
    before, _ = rewritten(before, "canonicalize")
    after, sites = smoothed(before)
    assert any(site.rewritten for site in sites), reasons(sites)
    assert same_bits(before, after, torch.randn(3, 5, WIDTH) * 4)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "sum": (lambda net, x: net.a(net.norm(x)) + net.norm(x).sum(), "sum.default reads it, too"),
    "output": (lambda net, x: (net.a(n := net.norm(x)), n), "it is an output of the program, too"),
    "gelu": (lambda net, x: net.out(functional.gelu(net.a(x))), "passes through gelu.default"),
    "square": (lambda net, x: net.out((y := net.a(x)) * y), "linear.default is read elsewhere"),
    "second product": (
        lambda net, x: net.out(functional.relu(y := net.a(x))) + net.out(y),
        "linear.default is read elsewhere as well",
    ),
    "shared weight": (
        lambda net, x: (net.a(net.norm(x)), functional.linear(x, net.a.weight)),
        "p_a_weight is read elsewhere as well",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_alone_has_a_reason(name: str) -> None:
    function, reason = REFUSED[name]
    before, _ = rewritten(program_of(function), "canonicalize")
    after, sites = smoothed(before)
    assert any(reason in found for found in reasons(sites)), reasons(sites)
    assert same_bits(before, after, torch.randn(3, 5, WIDTH))


def test_bad_input_is_refused() -> None:
    before = program_of(lambda net, x: net.a(net.norm(x)))
    with pytest.raises(PassError, match="no calibration inputs to see outliers in"):
        rewritten(before, ALWAYS)
    with pytest.raises(SpecError, match="alpha: expected above 0 to 1"):
        rewritten(before, "smooth-outliers{alpha=1.5}")
    broken = torch.randn(4, 9, WIDTH)
    broken[0, 0, 0] = torch.inf
    _, (site,) = smoothed(before, ALWAYS, calibrated(before, broken))
    assert site.reason == "its values are not finite"


def test_padding_is_not_calibration() -> None:
    program = program_of(lambda net, x: net.a(net.norm(x)))
    (norm,) = [n for n in program.graph.nodes if "layer_norm" in str(n.target)]
    x, mask = torch.randn(2, 6, WIDTH), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    x[mask == 0] = torch.nan
    found = sample_channels(program, [{"x": x, "mask": mask}], {norm}, "mask")[norm]
    assert torch.isfinite(found.largest).all()
    assert torch.cat(found.held_out).shape == (3, WIDTH)
    assert (found.fitting <= found.largest).all()
    assert (found.fitting < found.largest).any()
