"""fuse-skip-norm: residual sums that a norm reads, and sums that it must not take."""

from collections.abc import Callable
from typing import Any

import golden
import models
import pytest
import torch
from programs import (
    TOKENS,
    captured,
    count,
    ir_diff,
    outputs,
    prompts,
    reasons,
    relative_error,
    reloaded,
    rewritten,
    same_bits,
    values,
)
from tiny_programs import exact_program, tiny_program
from torch import Tensor, nn
from torch.export import ExportedProgram

WIDTH = 16


class Net(nn.Module):
    """A function of two values and a module with a linear and a norm."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.bare = nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False)
        self.wide = nn.RMSNorm((WIDTH, WIDTH), eps=1e-6)
        self.free = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, x, y)


def program_of(function: Callable[..., Any]) -> ExportedProgram:
    torch.manual_seed(0)
    net = Net(function).eval().requires_grad_(False)
    models.perturb(net)
    return captured(net, torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH), dynamic=TOKENS)


def test_sum_and_norm_become_one_op_and_the_sum_is_exact() -> None:
    def block(net: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + net.linear(y)
        return total, net.norm(total)

    before = program_of(block)
    after, sites = rewritten(before, "fuse-skip-norm")
    assert [site.rewritten for site in sites] == [True]
    assert (count(after, "add", "rms_norm"), count(after, "enginecast.skip_rms_norm.default")) == (
        0,
        1,
    )
    inputs = torch.randn(3, 7, WIDTH), torch.randn(3, 7, WIDTH)
    values(after, *inputs)
    assert same_bits(before, after, *inputs)
    assert same_bits(reloaded(after), after, *inputs)
    _, second = rewritten(after, "canonicalize,fuse-skip-norm")
    assert second == []


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "factor": (
        lambda n, x, y: n.norm(torch.add(x, y, alpha=2)),
        "the norm reads add.Tensor, expected a residual sum",
    ),
    "heads": (
        lambda n, x, y: n.norm(x[:, None] + y[:, None]),
        "the sum has rank 4, expected 2 or 3",
    ),
    "broadcast": (lambda n, x, y: n.norm(x + y[:, :1]), "an addend of the sum is broadcast"),
    "two dims": (
        lambda n, x, y: n.wide(x[..., None] * y[..., None, :] + y[..., None] * y[..., None, :]),
        "the norm is over 2 dims, expected the last one",
    ),
    "mixed dtypes": (
        lambda n, x, y: nn.functional.rms_norm(x.half() + y.half(), [WIDTH], n.norm.weight, 1e-6),
        "an addend is f16 and the norm's weight f32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_what_is_not_a_residual_norm_is_left_alone_with_the_reason(name: str) -> None:
    function, reason = REFUSED[name]
    before = program_of(function)
    after, sites = rewritten(before, "fuse-skip-norm")
    assert reasons(sites) == [reason]
    assert count(after, "rms_norm") == 1
    inputs = torch.randn(3, 7, WIDTH), torch.randn(3, 7, WIDTH)
    assert same_bits(before, after, *inputs)


@pytest.fixture(scope="module")
def t5() -> ExportedProgram:
    return tiny_program("t5")


@pytest.mark.parametrize("to", ["fp16"])
def test_t5_keeps_its_first_norm_alone(t5: ExportedProgram, to: str) -> None:
    before, _ = rewritten(t5, f"unify-dtype{{to={to}}},canonicalize")
    after, sites = rewritten(before, "fuse-rms-norm,fuse-skip-norm")
    assert [site.rewritten for site in sites] == [True, True, True, True]
    reference = exact_program("t5")
    inputs = prompts(5, 19)
    values(after, *inputs)
    (expected,) = outputs(reference, *inputs)
    limit = 1.5 * relative_error(outputs(before, *inputs)[0], expected)
    assert relative_error(outputs(after, *inputs)[0], expected) <= limit


def test_golden_fuse_skip_norm() -> None:
    before = program_of(lambda n, x, y: n.norm(x + n.linear(y)))
    after, _ = rewritten(before, "fuse-skip-norm")
    golden.check("fuse_skip_norm.diff", ir_diff(before, after))
