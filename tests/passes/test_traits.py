"""The table of traits: complete for what models call, and right where older tables disagreed."""

from typing import Any

import pytest
import torch
from programs import Function, captured, floats, outputs, program_of, rewritten
from small_programs import Encoder
from torch import Tensor, nn
from torch.fx import Graph
from zoo.ops_met import MET, family_ops, met, ops_of

from enginecast.ops.traits import NONE, OWN
from enginecast.passes.analyses.residual_stream import residual_sums
from enginecast.passes.analyses.strides import may_change_bits
from enginecast.passes.analyses.value_bounds import largest_for_any_input
from enginecast.passes.ir.edit import value
from enginecast.passes.ir.effects import is_pure, is_random
from enginecast.passes.ir.traits import Trait, has, is_identity, listed, traits_of
from enginecast.passes.precision.dtype_classes import Class, classify
from enginecast.verification.boundaries import fill_values

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


def test_every_op_of_a_small_model_is_among_those_that_were_met() -> None:
    ids, mask = torch.randint(0, 32, (2, 5)), torch.ones(2, 5, dtype=torch.int64)
    found = ops_of(captured(Encoder().eval(), ids, mask))
    assert len(found) > 5
    assert unknown(found) == []
    assert found <= met()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flan-t5", "bert"])
def test_what_a_family_calls_was_met(name: str) -> None:
    assert family_ops(name) <= met(), f"run {MET.with_suffix('.py').name}"


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


def test_the_larger_of_two_statistics_is_a_statistic() -> None:
    """Of the pairs only + - * / and where were known: `maximum` fell to the compute dtype."""

    def function(x: Tensor) -> Tensor:
        variance = x.var(-1, keepdim=True)
        return torch.maximum(variance, x.std(-1, keepdim=True))

    program = captured(Raised(function), floats(3, 8))
    assert classify(program)[node_of(program, aten.maximum.default)] is Class.PRECISE


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


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda mask: -mask, aten.neg.default),
        (lambda mask: mask.clamp_max(-7e4), aten.clamp_max.default),
    ],
)
def test_what_is_made_of_a_fill_value_need_not_be_one(function: Any, op: Any) -> None:
    """`neg` counted as a view, and `clamp_max` as no clamp: overflows of both were not reported."""
    program = program_of(lambda x: x + function(torch.full_like(x, -65504.0)), floats(3, 8))
    fills = fill_values(program)
    assert node_of(program, aten.full_like.default) in fills
    assert node_of(program, op) not in fills


def test_a_whole_number_filled_in_place_is_brought_into_range() -> None:
    """`masked_fill_` had a literal, but was not a fill: -100000 stayed, and became -inf in fp16."""

    def function(x: Tensor) -> Tensor:
        return (x * 2).masked_fill_(x > 0, -100000)

    after, _ = rewritten(program_of(function, floats(3, 8)), "unify-dtype{to=fp16}")
    assert torch.isfinite(outputs(after, floats(3, 8).half())[0]).all()


def test_a_padded_convolution_is_a_layer() -> None:
    """`conv1d` was heavy and `conv1d.padding` was not: the sum after it was not a residual."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(4, 4, 3, padding="same")

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = x + self.layer(x)
            return found

    program = captured(Padded(), floats(2, 4, 8))
    assert node_of(program, aten.conv1d.padding).op == "call_function"
    assert len(residual_sums(program)) == 1


def test_a_sine_is_bounded() -> None:
    """`sin` was bounded in one table, `erf` in another."""
    program = captured(Function(lambda x: (x.sin(), x.erf())), floats(3, 8))
    for op in (aten.sin.default, aten.erf.default):
        assert largest_for_any_input(program, set(), [node_of(program, op)]) == 1.0


def test_a_copy_of_floats_does_not_care_for_strides() -> None:
    """torch calls `clone` pointwise, and pointwise floats were held to round by their strides."""
    program = program_of(lambda x: x.transpose(0, 1).clone(), floats(3, 8))
    source = node_of(program, aten.transpose.int)
    assert not may_change_bits(source, value(source).contiguous())


def test_an_op_that_is_tagged_as_random_and_draws_nothing_is_pure() -> None:
    """`dequantize_axis` has the tag as `dequantize` does, and stood in no table."""
    for name in ("dequantize", "dequantize_axis", "quantized_linear", "blockwise_linear"):
        op = getattr(torch.ops.enginecast, name).default
        assert torch.Tag.nondeterministic_seeded in op.tags
        node = Graph().call_function(op, ())
        assert is_pure(node)
        assert not is_random(node)


def test_dropout_is_an_identity_where_it_draws_nothing() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    assert is_identity(graph.call_function(aten.dropout.default, (x, 0.1, False)))
    assert not is_identity(graph.call_function(aten.dropout.default, (x, 0.1, True)))


def test_an_op_that_works_in_place_is_as_the_one_that_does_not() -> None:
    plain, in_place = traits_of(aten.add.Tensor), traits_of(aten.add_.Tensor)
    assert in_place == plain | Trait.WRITES | Trait.ALIASES
    assert Trait.WRITES not in traits_of(aten.detach_.default)


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
