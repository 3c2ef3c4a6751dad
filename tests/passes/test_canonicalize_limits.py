"""canonicalize leaves alone what it would change: casts, writes in place, random values, names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import (
    TOKENS,
    canonical,
    captured,
    count,
    floats,
    outputs,
    program_of,
    same_bits,
    targets,
)
from torch import Tensor, nn

Make = Callable[..., Any]


def ones_then_written(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], dtype=torch.bool)
    mask[0] = False
    return mask & (x > 0)


def zeros_then_written(x: Tensor) -> Tensor:
    total = torch.zeros(3)
    total[0] += x.sum()
    return total * 2


def tensor_then_written(x: Tensor) -> Tensor:
    total = torch.tensor([1.0])
    total += x.sum()
    return total * 2


def read_before_written(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    first = y.half().float() + 1
    y.add_(1)
    return first, y.half().float() + 1


def mixed_and(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], dtype=torch.int64) & (x > 0)


# Function, ops that must all be there afterwards.
KEPT: dict[str, tuple[Make, list[str]]] = {
    "cast that rounds": (lambda x: x.half().float(), ["to.dtype", "to.dtype"]),
    "integers through a float": (
        lambda x: ((x > 0).long() + 16777216).float().long(),
        ["to.dtype", "to.dtype", "to.dtype"],
    ),
    "float zero": (lambda x: x + 0, ["add.Tensor"]),
    "integer plus float zero": (lambda x: (x > 0).long() + 0.0, ["add.Tensor"]),
    "contiguous before view": (
        lambda x: x.transpose(0, 1).contiguous().view(-1),
        ["contiguous.default"],
    ),
    "contiguous before a convolution": (
        lambda x: nn.functional.conv1d(x.t().contiguous()[None], torch.ones(2, x.shape[1], 1)),
        ["contiguous.default"],
    ),
    "expand that something else reads": (
        lambda x: (x[:, :1].expand(x.shape) + x, x[:, :1].expand(x.shape)),
        ["expand.default"],
    ),
    "index of a part": (
        lambda x: x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1]) // 2],
        ["index.Tensor"],
    ),
    "index in another order": (
        lambda x: x[torch.arange(x.shape[0])[None, :], torch.arange(x.shape[1])[:, None]],
        ["index.Tensor"],
    ),
    "target of in-place read by a view": (
        lambda x: ((v := (y := x * 2).detach()) * 1, y.add_(1), v * 3),
        ["add.Tensor"],
    ),
    "in-place on an input": (lambda x: x.add_(1) * 2, ["add.Tensor"]),
    "in-place on a view": (lambda x: ((y := x * 2)[0].add_(1), y * 3), ["select_scatter.default"]),
    "signed zeros": (lambda x: (x * 0.0, x * -0.0), ["mul.Tensor"] * 2),
    "and that may be false": (
        lambda x: (torch.arange(x.shape[1]) >= 1) & (x > 0),
        ["__and__.Tensor"],
    ),
    "and of integers": (mixed_and, ["__and__.Tensor"]),
    "mask that is written": (ones_then_written, ["__and__.Tensor"]),
    "literal that is written": (tensor_then_written, []),
    "value read around a write": (read_before_written, []),
}


@pytest.mark.parametrize("case", KEPT)
def test_rule_leaves_alone_what_it_would_change(case: str) -> None:
    function, kept = KEPT[case]
    before = program_of(function, floats(2, 5))
    after = canonical(before)
    found = targets(after)
    for op in set(kept):
        assert found.count(op) >= kept.count(op), f"{op} is gone: {found}"
    assert same_bits(before, after, floats(3, 7))


@pytest.mark.parametrize("function", [zeros_then_written, tensor_then_written])
def test_constant_that_is_written_starts_afresh_in_every_call(function: Make) -> None:
    before = program_of(function, floats(2, 5))
    run = canonical(before).module()
    x = floats(3, 7)
    expected = outputs(before, x)
    for _ in range(2):
        assert torch.equal(run(x), expected[0])


def test_active_dropout_and_random_values_stay() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dropped = nn.functional.dropout(x, 0.5, True)
            return dropped + torch.rand_like(x) + torch.rand_like(x) + torch.rand(3, 4)

    before = captured(Noise(), torch.randn(3, 4))
    after = canonical(before)
    assert count(after, "dropout") == 1
    assert count(after, "rand_like") == 2
    assert count(after, "rand") == 1


def _turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


class Reached(nn.Module):
    """What another layout of `_turned` reaches."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(33, 33))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


linear = nn.functional.linear
attention = nn.functional.scaled_dot_product_attention
# What reads the copy, and how many copies must stay.
STRIDES_REACH: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "a linear": (lambda x, w: linear(_turned(x), w), 1),
    "a mean": (lambda x, w: _turned(x).mean(-1), 1),
    "a softmax": (lambda x, w: _turned(x).softmax(-1), 1),
    "a norm": (lambda x, w: nn.functional.layer_norm(_turned(x), (33,)), 1),
    "a product, by a residual": (lambda x, w: linear((y := _turned(x)) + torch.relu(y), w), 1),
    "a product, by a merged view": (lambda x, w: _turned(x)[:, None].flatten(0, 1) @ w, 1),
    "attention": (lambda x, w: attention(y := _turned(x), y, y), 1),
    "nothing": (lambda x, w: torch.relu(_turned(x)) * 2, 0),
    "a product that lies as before": (
        lambda x, w: w @ x.transpose(1, 2).transpose(1, 2).contiguous(),
        0,
    ),
}


@pytest.mark.parametrize("dynamic", [None, TOKENS], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", STRIDES_REACH)
def test_strides_that_reach_what_rounds_by_them_are_kept(
    case: str, dynamic: dict[int, Any] | None
) -> None:
    function, kept = STRIDES_REACH[case]
    torch.manual_seed(0)
    shapes = {"x": {0: dynamic[0]}} if dynamic else None
    x = torch.randn(3, 33, 37)
    with torch.no_grad():
        program = torch.export.export(Reached(function).eval(), (x,), dynamic_shapes=shapes)
    ranges = dict(program.range_constraints)
    after = canonical(program)
    assert count(after, "contiguous") == kept
    assert same_bits(program, after, x)
    assert program.range_constraints == ranges
