"""The table of traits: complete for what models call, and right where older tables disagreed."""

from typing import Any

import pytest
import torch
from programs import captured, floats
from torch import Tensor, nn
from torch.fx import Graph
from zoo.ops_met import met

from enginecast.ops.traits import NONE, OWN
from enginecast.passes.ir.traits import Trait, has, listed, traits_of
from enginecast.passes.precision.dtype_classes import Class, classify

aten = torch.ops.aten


def unknown(names: set[str]) -> list[str]:
    """The ops of torch's of which neither the table nor torch says anything."""
    found = []
    for name in sorted(names):
        namespace, packet, overload = name.rsplit(".", 2)
        if namespace in ("aten", "enginecast"):
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
            if listed(op) is None and traits_of(op) is NONE:
                found.append(name)
    return found


def test_every_op_that_models_call_has_traits() -> None:
    assert len(met()) > 80
    assert unknown(met()) == []


def test_an_op_without_traits_is_found_out() -> None:
    assert unknown({"aten.dist.default"}) == ["aten.dist.default"]


def test_every_op_of_ours_has_traits_and_stands_in_its_folder() -> None:
    names = set(dir(torch.ops.enginecast))
    assert {op._schema.name.removeprefix("enginecast::") for op in OWN} <= names
    assert all(traits_of(op) is not None for op in OWN)


def node_of(program: Any, op: Any) -> Any:
    [node] = program.graph.find_nodes(op="call_function", target=op)
    return node


class Raised(nn.Module):
    """What a function makes of values that the source raised to fp32."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x).float())


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.unflatten(-1, (2, 4)).softmax(-1), aten.softmax.int),
        (lambda x: x.unsqueeze(-1).squeeze().softmax(-1), aten.softmax.int),
        (lambda x: x[:, torch.tensor([1, 0])].softmax(-1), aten.softmax.int),
        (lambda x: nn.functional.group_norm(x, 1), aten.group_norm.default),
    ],
)
def test_what_only_moves_leaves_a_raised_value_raised(function: Any, op: Any) -> None:
    """`unflatten` and `squeeze` without a dim were not moves: the softmax ran in fp16."""
    program = captured(Raised(function), floats(3, 8))
    assert classify(program)[node_of(program, op)] is Class.PRECISE


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten._unsafe_view.default, ([6],)),
        (aten.type_as.default, (torch.zeros(1),)),
        (aten.unsafe_chunk.default, (2,)),
        (aten.einsum.default, ()),
    ],
)
def test_what_shares_memory_without_saying_so_is_known(op: Any, args: Any) -> None:
    """Their schemas do not say it, so a value that is written through them would look untouched."""
    x = torch.zeros(2, 3)
    first = ("ij->ij", [x]) if op is aten.einsum.default else (x, *args)
    result = op(*first)
    result = result[0] if isinstance(result, list) else result
    assert result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert Trait.ALIASES in traits_of(op)


@pytest.mark.parametrize("name", ["exact", "correctly rounded"])
def test_what_traits_promise_of_numbers_holds(name: str) -> None:
    """Exact ops of halves give what they give in fp64; correctly rounded ones that, rounded."""
    trait = Trait.EXACT if name == "exact" else Trait.CORRECTLY_ROUNDED
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).half()
    y = torch.randn(64, generator=torch.Generator().manual_seed(1)).half()
    tried = 0
    unary = "abs neg relu ceil floor trunc round sign sqrt reciprocal square clone"
    binary = "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum fmax fmin"
    for spelled, args in ((unary, (x,)), (binary, (x, y))):
        for one in spelled.split():
            packet, _, overload = one.partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            graph = Graph()
            if not has(graph.call_function(op, ()), trait):
                continue
            wide = op(*(a.double() for a in args))
            assert torch.equal(op(*args).nan_to_num(), wide.half().nan_to_num()), one
            if trait is Trait.EXACT:
                assert torch.equal(wide.half().double().nan_to_num(), wide.nan_to_num()), one
            tried += 1
    assert tried >= 8
