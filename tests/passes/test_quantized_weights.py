"""Quantized weights stay quantized: what is computed beforehand, merged, dropped and stored."""

import pytest
import torch
from programs import captured, count, outputs, program_of, rewritten, same_bits
from test_hoist_weights import Holder, evaluated, hoisted, parameter
from torch import Tensor
from torch.nn import functional

from enginecast.ops.blockwise_linear import blockwise_linear, quantize_blocks
from enginecast.ops.quantize import dequantize, dynamic_scale, quantize
from enginecast.ops.quantized_linear import integer_linear, quantized_linear
from enginecast.passes.ir.edit import erase_dead, weight_expressions

FP8 = torch.float8_e4m3fn


def stored(module: Holder, x: Tensor) -> Tensor:
    """A linear whose weight is kept in fp8."""
    scale = dynamic_scale(module.w, FP8, True)
    weight = dequantize(quantize(module.w, scale, FP8), scale, torch.float32)
    return functional.linear(x, weight)


def multiplied(module: Holder, x: Tensor) -> Tensor:
    scale, row = dynamic_scale(module.w, FP8, True), dynamic_scale(x, FP8, True)
    weight = quantize(module.w, scale, FP8)
    found: Tensor = quantized_linear(quantize(x, row, FP8), row, weight, scale, None, torch.float32)
    return found


def by_blocks(module: Holder, x: Tensor) -> Tensor:
    blocks = module.w.unflatten(1, (2, 4)).abs().amax(-1) / 7
    weight = quantize_blocks(module.w, blocks, 4)
    found: Tensor = blockwise_linear(x, weight, blocks, None, 4, False)
    return found


def test_an_engine_holds_quantized_values_and_scales() -> None:
    for function, dtype in ((stored, FP8), (multiplied, FP8), (by_blocks, torch.int8)):
        program = captured(Holder(function, w=parameter(12, 8)), torch.randn(3, 8))
        after, weights = hoisted(program)
        assert sorted(str(weight.dtype) for weight in weights.values()) == sorted(
            map(str, (dtype, torch.float32))
        )
        x = torch.randn(3, 8)
        assert torch.equal(evaluated(after, x)[0], outputs(program, x)[0])


def test_what_reads_a_quantized_weight_is_not_a_weight_expression() -> None:
    program = captured(Holder(stored, w=parameter(12, 8)), torch.randn(3, 8))
    inside = {node.name for node in weight_expressions(program)}
    assert {"quantize", "dynamic_scale"} <= inside
    assert "dequantize" not in inside


def test_equal_ones_are_merged_and_unused_ones_dropped() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = dynamic_scale(x, FP8, True)
        q = quantize(x, scale, FP8)
        quantized_linear(q, scale, q[0], scale[0], None, torch.float32)
        return dequantize(q, scale, torch.float32), dequantize(q, scale, torch.float32)

    program = program_of(twice, torch.randn(2, 5, 8))
    names = ["enginecast.quantized_linear.default", "enginecast.dequantize.default"]
    assert [count(program, name) for name in names] == [1, 2]
    after, _ = rewritten(program, "canonicalize")
    assert [count(after, name) for name in names] == [0, 1]
    assert same_bits(program, after, torch.randn(3, 7, 8))
    for node in reversed(after.graph.nodes):
        if node.op == "output":
            node.args = ((),)
    erase_dead(after.graph)
    assert not [node for node in after.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("size", [1024, 1025, 2500])
def test_whole_numbers_are_summed_exactly(size: int) -> None:
    """fp32 holds the sum of 1024 products at their largest."""
    torch.manual_seed(size)
    x = torch.randint(-127, 128, (3, size), dtype=torch.int8)
    weight = torch.randint(-127, 128, (4, size), dtype=torch.int8)
    x[0], weight[0] = 127, 127
    one = torch.ones(())
    expected = (x.long() @ weight.long().T).float()
    assert torch.equal(quantized_linear(x, one, weight, one, None, torch.float32), expected)
    unsigned = (x.short() + 128).to(torch.uint8)
    assert torch.equal(integer_linear(unsigned, one, weight.T, one, None, torch.float32), expected)
