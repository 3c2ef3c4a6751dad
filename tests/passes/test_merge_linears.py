"""merge-linears: one product for linears of one input, and weights that must stay apart."""

from collections.abc import Callable
from typing import Any

import golden
import pytest
import torch
from programs import (
    TOKENS,
    captured,
    count,
    ir_diff,
    notes,
    outputs,
    prompts,
    reasons,
    relative_error,
    reloaded,
    rewritten,
    same_bits,
    values,
)
from slow_cases import some_slow
from tiny_programs import exact_program, tiny_program
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.functional import linear

from enginecast.passes.ir.edit import weight_expressions

WIDTH = 16


class Net(nn.Module):
    """A function of x and a module with linears."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 12)
        self.plain = nn.Linear(WIDTH, 8, bias=False)
        self.low = nn.Linear(WIDTH, 8).half()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def program_of(function: Callable[..., Any]) -> ExportedProgram:
    torch.manual_seed(0)
    net = Net(function).eval().requires_grad_(False)
    return captured(net, torch.randn(2, 5, WIDTH), dynamic=TOKENS)


def pair(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    return net.a(x), net.b(x)


PROJECTIONS = (("t5", [3, 2, 3, 2]), ("bert", [3, 3]))
"""Models, and how many projections become one, layer by layer."""


@pytest.mark.parametrize(
    ("to", "name", "groups"),
    some_slow(
        [(to, *model) for to in ("fp32", "fp16") for model in PROJECTIONS],
        ["fp16-bert", "fp32-bert", "fp32-t5"],
        lambda case: f"{case[0]}-{case[1]}",
    ),
)
def test_projections_of_real_models(name: str, groups: list[int], to: str) -> None:
    before, _ = rewritten(tiny_program(name), f"unify-dtype{{to={to}}},canonicalize")
    after, sites = rewritten(before, "merge-linears")
    assert [note.count(",") + 1 for note in dict.fromkeys(notes(sites))] == groups
    assert count(after, "linear") == count(before, "linear") - sum(groups) + len(groups)
    expressions = weight_expressions(after)
    cats = [n for n in after.graph.nodes if str(n.target) == "aten.cat.default"]
    assert all(node in expressions for node in cats)
    reference = exact_program(name)
    inputs = prompts(4, 19)
    values(after, *inputs)
    (expected,) = outputs(reference, *inputs)
    limit = 1.5 * relative_error(outputs(before, *inputs)[0], expected)
    assert relative_error(outputs(after, *inputs)[0], expected) <= limit
    assert same_bits(reloaded(after), after, *inputs)


def test_a_view_of_a_result_becomes_a_reshape() -> None:
    """It is a part of a wider one then, and not contiguous."""

    def heads(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        return net.a(x).view(-1, 4), net.b(x)

    before = program_of(heads)
    after, _ = rewritten(before, "merge-linears")
    assert same_bits(before, after, torch.randn(3, 7, WIDTH))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "weight read twice": (
        lambda n, x: (n.a(x), n.b(x), n.a(x)),
        "p_a_weight is read elsewhere as well",
    ),
    "weight behind a cast read elsewhere": (
        lambda n, x: [n.low(h := x.half()), linear(h, n.a.weight.half(), n.low.bias), n.a.weight],
        "p_a_weight is read elsewhere as well",
    ),
    "some biases": (
        lambda n, x: (n.a(x), n.plain(x)),
        "some of the linears have a bias and some do not",
    ),
    "bias of one number": (
        lambda n, x: (linear(x, n.a.weight, n.a.bias[:1]), linear(x, n.b.weight, n.b.bias)),
        "a bias is broadcast over the features",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_linears_that_stay_apart_say_why(name: str) -> None:
    function, reason = REFUSED[name]
    before = program_of(function)
    after, sites = rewritten(before, "merge-linears")
    assert set(reasons(sites)) == {reason}
    assert same_bits(before, after, torch.randn(3, 7, WIDTH))


def test_golden_merge_linears() -> None:
    before = program_of(pair)
    after, _ = rewritten(before, "merge-linears")
    golden.check("merge_linears.diff", ir_diff(before, after))
