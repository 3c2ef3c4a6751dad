"""Bounds from weights alone: never exceeded, exact where they can be, and nothing where unknown."""

import math
from collections.abc import Callable

import pytest
import torch
from programs import TOKENS, captured, prompts, rewritten
from tiny_programs import tiny_program
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.analyses.scale_free import find_regions
from enginecast.passes.analyses.value_bounds import largest_for_any_input
from enginecast.passes.ir.edit import weight_expressions
from enginecast.passes.ir.interpret import interpret_cases

WIDTH = 8


class Block(nn.Module):
    """Norm, linear, and what a test does with them."""

    def __init__(self, function: Callable[["Block", Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function
        with torch.no_grad():
            self.norm.weight.fill_(2.0)
            self.linear.weight.zero_()
            self.linear.weight[3, 5] = 7.0
            self.linear.bias.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def bound_of(function: Callable[[Block, Tensor], Tensor]) -> float | None:
    program = captured(Block(function), torch.randn(2, 5, WIDTH), dynamic=TOKENS)
    [result] = program.graph.output_node().all_input_nodes
    return largest_for_any_input(program, weight_expressions(program), [result])


# The longest row of a norm is sqrt(WIDTH), and all of it may stand in one element.
KNOWN: dict[str, tuple[Callable[[Block, Tensor], Tensor], float]] = {
    "norm": (lambda b, x: b.norm(x), 2 * math.sqrt(WIDTH)),
    "linear": (lambda b, x: b.linear(b.norm(x)), 7 * 2 * math.sqrt(WIDTH) + 0.5),
    "sum": (lambda b, x: b.norm(x) + b.norm(x * 3), 4 * math.sqrt(WIDTH)),
    "gate": (lambda b, x: torch.sigmoid(x) * b.norm(x), 2 * math.sqrt(WIDTH)),
    "join": (lambda b, x: torch.cat([b.norm(x), -b.norm(x * 2)], 1), 2 * math.sqrt(WIDTH)),
    "number": (lambda b, x: b.norm(x) * -4.0, 8 * math.sqrt(WIDTH)),
    "a broadcast gate": (
        lambda b, x: b.linear(torch.sigmoid(x) * torch.sigmoid(x[..., :1])),
        7 * math.sqrt(WIDTH) + 0.5,
    ),
    "attention": (
        lambda b, x: nn.functional.scaled_dot_product_attention(
            x[:, None], x[:, None], b.norm(x)[:, None]
        ),
        2 * math.sqrt(WIDTH),
    ),
    "spelled attention": (
        lambda b, x: torch.softmax(x @ x.transpose(1, 2), -1) @ b.norm(x),
        2 * math.sqrt(WIDTH),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_bound_is_what_the_worst_input_reaches(name: str) -> None:
    function, expected = KNOWN[name]
    assert bound_of(function) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, x: x,
        lambda b, x: b.linear(x),
        lambda b, x: b.norm(x).exp(),
        lambda b, x: x @ x.mT,
        lambda b, x: nn.functional.dropout(b.norm(x), 0.5, training=True),
    ],
    ids=["input", "linear of an input", "unknown op", "product of inputs", "active dropout"],
)
def test_what_has_no_bound_is_reported_as_such(function: Callable[[Block, Tensor], Tensor]) -> None:
    assert bound_of(function) is None


@pytest.fixture(scope="module", params=["t5", "llama"])
def program(request: pytest.FixtureRequest) -> ExportedProgram:
    return tiny_program(request.param)


@pytest.mark.parametrize("pipeline", ["", "fuse-rms-norm"])
def test_no_prompt_exceeds_the_bound_of_a_stream(program: ExportedProgram, pipeline: str) -> None:
    program = rewritten(program, pipeline)[0] if pipeline else program
    weights = weight_expressions(program)
    [stream] = [one for one in find_regions(program, weights) if one.is_residual]
    bound = largest_for_any_input(program, weights, stream.members)
    assert bound is not None
    names = [n.name for n in program.graph.nodes if n.op == "placeholder" and n not in weights]
    cases = [dict(zip(names, prompts(4, 12), strict=True)) for _ in range(8)]
    largest = 0.0

    def watch(_: int, node: Node, tensor: Tensor) -> None:
        nonlocal largest
        if node in stream.members:
            largest = max(largest, float(tensor.abs().max()))

    interpret_cases(program, cases, watch=watch)
    assert 0 < largest <= bound
