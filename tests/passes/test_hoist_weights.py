"""Weight expressions become placeholders without data, and their values stay what they were."""

from collections.abc import Callable
from typing import Any

import torch
from programs import captured, count, outputs, rewritten
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.passes.ir.deferred_weights import DeferredWeight, deferred_weights
from enginecast.passes.ir.edit import input_names, weight_specs
from enginecast.passes.ir.interpret import interpret
from enginecast.passes.ir.text import print_ir


class Holder(nn.Module):
    """A function of an input and of named weights: parameters and buffers."""

    w: Tensor

    def __init__(self, function: Callable[..., Any], **weights: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in weights.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class QKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        for name in "qkv":
            setattr(self.attention, name, nn.Linear(8, 8))
        self.spare = nn.Linear(8, 300)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (getattr(self.attention, name)(x) for name in "qkv")
        result: Tensor = q * k + v
        return result


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    # Whole numbers: sums of them are exact, in whatever order a kernel adds.
    return nn.Parameter(torch.randint(-9, 10, shape).to(dtype), requires_grad=False)


def hoisted(program: ExportedProgram) -> tuple[ExportedProgram, dict[str, DeferredWeight]]:
    after, _ = rewritten(program, "hoist-weights")
    weights = deferred_weights(after)
    names = [weight.name for weight in weights.values()]
    assert len(names) == len(set(names))
    assert [spec.target for spec in weight_specs(after).values()] == list(weights)
    return after, {weight.name: weight for weight in weights.values()}


def evaluated(program: ExportedProgram, *x: Tensor) -> list[Tensor]:
    """Run a hoisted program, whose weights are computed on the way."""
    for weight in deferred_weights(program).values():
        value = weight.compute()
        assert (value.dtype, tuple(value.shape)) == (weight.dtype, weight.shape)
        assert value.is_contiguous()
        assert value.nbytes == weight.size
    given = dict(zip(input_names(program), x, strict=True))
    return list(interpret(program, given).values())


def check(module: nn.Module, x: Tensor) -> tuple[ExportedProgram, dict[str, DeferredWeight]]:
    program = captured(module, x)
    after, weights = hoisted(program)
    wanted = outputs(program, x)
    found = evaluated(after, x)
    for one, other in zip(found, wanted, strict=True):
        # A product with a contiguous weight may add in another order than with a transposed one.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return after, weights


def test_expression_becomes_one_placeholder_without_data() -> None:
    module = Holder(lambda m, x: x @ m.w.half().t().float(), w=parameter(40, 8))
    after, weights = check(module, torch.randn(3, 8))
    assert count(after, "matmul") == len([n for n in after.graph.nodes if n.op == "call_function"])
    weight = weights["w"]
    assert weight.shape == (8, 40)
    (stand_in,) = after.state_dict.values()
    assert stand_in.untyped_storage().nbytes() == stand_in.itemsize
    assert torch.equal(weight.compute(), module.w.half().t().float())


def test_weights_that_nothing_reads_do_not_travel_along() -> None:
    after, weights = check(QKV(), torch.randn(3, 8))
    assert not any("spare" in name for name in weights)
    assert not any("spare" in name or "attention" in name for name in after.state_dict)


def test_tied_weights_are_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Embedding(96, 8), nn.Embedding(96, 8)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.first(x) * 2 + self.second(x + 1)
            return result

    _, weights = check(Tied(), torch.randint(0, 95, (2, 5)))
    assert len(weights) == 1


def test_table_that_grows_is_computed_by_the_engine() -> None:
    module = Holder(lambda m, x: x + m.w.expand(3000, 7).cos(), w=parameter(1, 7))
    after, weights = check(module, torch.randn(3000, 7))
    assert [w.shape for w in weights.values()] == [(1, 7)]
    assert count(after, "expand", "cos") == 2


def test_original_program_is_untouched() -> None:
    program = captured(QKV(), torch.randn(3, 8))
    before, state = print_ir(program), dict(program.state_dict)
    specs = list(program.graph_signature.input_specs)
    hoisted(program)
    assert print_ir(program) == before
    assert program.state_dict.keys() == state.keys()
    assert all(program.state_dict[name] is tensor for name, tensor in state.items())
    assert list(program.graph_signature.input_specs) == specs
