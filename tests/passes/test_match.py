"""What matchers ask of single nodes: scalars, casts, reductions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import program_of
from torch import Tensor
from torch.fx import Node

from enginecast.passes.ir.edit import aten
from enginecast.passes.ir.match import (
    behind_casts,
    is_float_cast,
    reduces_last_dim,
    scalar_operand,
)


def node_of(function: Callable[[Tensor], Any], target: object) -> Node:
    """The first call of an op in a captured function."""
    nodes: list[Node] = list(program_of(function, torch.randn(2, 5)).graph.nodes)
    return next(node for node in nodes if node.target is target)


def test_numbers_are_read_on_either_side() -> None:
    for function in (lambda x: x * 3, lambda x: 3 * x, lambda x: x * 3.0):
        found = scalar_operand(node_of(function, aten.mul.Tensor), aten.mul.Tensor)
        assert found is not None
        assert found[0].op == "placeholder"
        assert found[1] == 3.0
    plain = node_of(lambda x: x * x, aten.mul.Tensor)
    assert scalar_operand(plain, aten.mul.Tensor) is None
    assert scalar_operand(plain, aten.add.Tensor) is None
    factor = node_of(lambda x: torch.add(x, 1.0, alpha=2), aten.add.Tensor)
    assert scalar_operand(factor, aten.add.Tensor) is None


def test_casts_between_floats_and_inert_nodes_are_looked_through() -> None:
    node = node_of(lambda x: x.half().float().sin(), aten.sin.default)
    source = node.all_input_nodes[0]
    assert is_float_cast(source)
    assert behind_casts(source).op == "placeholder"
    integer = node_of(lambda x: (x > 0).float().sin(), aten.sin.default).all_input_nodes[0]
    assert not is_float_cast(integer)
    assert behind_casts(integer) is integer


@pytest.mark.parametrize(
    ("dims", "keep", "expected"),
    [([-1], True, True), ([1], True, True), ([-1], False, False), ([0], True, False)],
)
def test_reduction_of_the_last_dim(dims: list[int], keep: bool, expected: bool) -> None:
    node = node_of(lambda x: x.mean(dims, keepdim=keep), aten.mean.dim)
    assert reduces_last_dim(node) == expected
