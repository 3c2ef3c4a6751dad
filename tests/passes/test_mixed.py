"""residual=fp32: the stream and its norms in fp32, the branches in fp16, and every fusion kept."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from programs import (
    Function,
    calibrated,
    captured,
    outputs,
    relative_error,
    rewritten,
)
from tiny_programs import exact_program, inputs_of, tiny_program
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.errors import PassError
from enginecast.passes.analyses.residual_stream import residual_sums
from enginecast.passes.ir.base import Pass, PassContext, Site
from enginecast.passes.ir.edit import aten, dtype_of, insert, structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.precision.cast_borders import check_casts
from enginecast.passes.presets import preset
from enginecast.passes.unify_dtype import UnifyDtype

FUSED = (
    "aten.rms_norm.default",
    "enginecast.skip_rms_norm.default",
    "enginecast.attention.default",
)


@functools.cache
def halves(name: str) -> tuple[ExportedProgram, ExportedProgram]:
    """A program in fp16, and in fp16 with its stream in fp32."""
    program = tiny_program(name)
    low, _ = rewritten(program, preset("fp16"), calibrated(program))
    return low, rewritten(program, preset("mixed"))[0]


def fusions(program: ExportedProgram) -> dict[str, int]:
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return {name: calls.count(name) for name in FUSED}


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_stream_is_fp32_branches_are_fp16_and_no_fusion_is_lost(name: str) -> None:
    after, _ = rewritten(tiny_program(name), "unify-dtype{to=fp16 residual=fp32}")
    sums = residual_sums(after)
    assert {dtype_of(node) for node in sums} == {torch.float32}
    linears = [n for n in after.graph.nodes if n.target is aten.linear.default]
    assert {dtype_of(node) for node in linears} == {torch.float16}
    low, mixed = halves(name)
    had, have = fusions(low), fusions(mixed)
    for kind in FUSED[1:]:
        assert have[kind] >= had[kind], kind
    assert have[FUSED[0]] + have[FUSED[1]] == had[FUSED[0]] + had[FUSED[1]], "norms"


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_error_is_no_larger_than_in_fp16(name: str) -> None:
    reference = exact_program(name)
    low, mixed = halves(name)
    inputs = inputs_of(name, 3, 17)
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    (expected,) = outputs(reference, *wide)
    errors = [relative_error(outputs(p, *inputs)[0], expected) for p in (mixed, low)]
    assert outputs(mixed, *inputs)[0].dtype == torch.float16
    assert errors[0] <= 1.1 * errors[1]


class Deep(nn.Module):
    """Pre-norm layers whose stream grows beyond fp16's range while no branch does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):  # every branch points where the stream points
                nn.init.eye_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            norm = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            x = x + layer(norm.type_as(x)) * 1.5e4
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


def test_stream_beyond_the_range_of_fp16_survives_in_mixed() -> None:
    torch.manual_seed(0)
    before = captured(Deep().requires_grad_(False), x := torch.randn(2, 5, 16))
    low, _ = rewritten(before, "unify-dtype{to=fp16}")
    mixed, _ = rewritten(before, "unify-dtype{to=fp16 residual=fp32}")
    (expected,) = outputs(before, x)
    assert not outputs(low, x.half())[0].isfinite().all()
    assert relative_error(outputs(mixed, x.half())[0], expected) < 2e-3


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, w: x + torch.relu(x @ w), 1),
        (lambda x, w: torch.relu(x @ w) + x, 1),
        (lambda x, w: x @ w + torch.relu(x), 0),
        (lambda x, w: x + 0.044715 * x**3, 0),
    ],
    ids=["residual first", "branch first", "two branches", "a GELU"],
)
def test_what_is_a_residual_sum(function: Callable[..., Tensor], found: int) -> None:
    before = captured(Function(function), torch.randn(4, 4), torch.randn(4, 4))
    assert len(residual_sums(before)) == found


@dataclass(frozen=True)
class Rounds(Pass):
    """Rounds what the first linear reads to bf16 and back."""

    name = "rounds"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        graph = program.graph
        node = next(n for n in graph.nodes if n.target is aten.linear.default)
        source = node.args[0]
        with graph.inserting_before(node):
            low = insert(graph, aten.to.dtype, (source, torch.bfloat16), like=node, name="low")
            back = insert(graph, aten.to.dtype, (low, torch.float16), like=node, name="back")
        node.replace_input_with(source, back)
        return []


def test_cast_that_nobody_explains_is_an_error_with_the_list() -> None:
    passes = (UnifyDtype(to="fp16"), Rounds())
    with pytest.raises(PassError) as caught:
        run_pipeline(passes, structural_copy(tiny_program("t5")), PassContext())
    message = caught.value.message
    assert "2 unexpected casts between float dtypes are left" in message
    place = r"model\.encoder\.block\.0\.layer\.0\.SelfAttention\.q modeling_t5\.py:\d+"
    assert re.search(rf"low casts \S+ f16 -> bf16 \({place}\)", message), message
    assert re.search(rf"back casts low bf16 -> f16 \({place}\)", message), message
    check_casts(rewritten(tiny_program("t5"), "unify-dtype{to=fp16}")[0])
