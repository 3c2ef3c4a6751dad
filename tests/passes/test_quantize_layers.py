"""fp8-matmul and int8-matmul: what they write for each form, what they share, what they refuse."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import golden
import models
import pytest
import torch
from planned_programs import carried_out, plan_for, quantized_by_plan
from programs import (
    TOKENS,
    Text,
    captured,
    count,
    ir_diff,
    outputs,
    prompts,
    relative_error,
    rewritten,
    seeded,
)
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import T5EncoderModel

from enginecast.errors import PassError
from enginecast.ops.quantize import SMALLEST_SCALE
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import (
    structural_copy,
    weight_expressions,
    weight_value,
)
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.quantization_plan import Format, attach_plan, plan_of

WIDTH = 32
FP8 = torch.float8_e4m3fn


class Net(nn.Module):
    """A function of x and a module with layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 48, bias=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.table = nn.Embedding(40, WIDTH)
        self.conv = nn.Conv1d(WIDTH, 8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def net(function: Callable[..., Any]) -> Net:
    torch.manual_seed(0)
    return Net(function).eval().requires_grad_(False)


def program_of(function: Callable[..., Any]) -> ExportedProgram:
    return captured(net(function), torch.randn(2, 5, WIDTH), dynamic=TOKENS)


def pair(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    h = net.norm(x)
    return net.a(h), net.b(h)


def calls(program: ExportedProgram, target: object) -> list[Any]:
    return [node for node in program.graph.nodes if node.target is target]


VIEWS: dict[str, Callable[[Net, Tensor], Any]] = {
    "as one matrix": lambda n, x: (n.a(h := x.tanh()), n.b(h.reshape(-1, WIDTH))),
    "twice": lambda n, x: (n.a((h := x.tanh()).unsqueeze(0)), n.b(h.reshape(-1, WIDTH)[None])),
    "an input": lambda n, x: (n.a(x), n.b(x.reshape(-1, WIDTH))),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("form", ["rowwise", "tensorwise"])
def test_views_of_one_value_share_its_quantization(name: str, form: str) -> None:
    before = program_of(VIEWS[name])
    after = quantized_by_plan(before, form)
    of_inputs = [n for n in calls(after, own.quantize.default) if "weight" not in n.args[0].name]
    assert len(of_inputs) == 1
    x = torch.randn(3, 7, WIDTH)
    for found, expected in zip(outputs(after, x), outputs(before, x), strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) < 0.06


def test_static_scales_come_from_valid_rows() -> None:
    def masked(net: Net, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = net.a(x * 2) * mask.unsqueeze(-1)
        return found

    class Masked(Net):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return masked(self, x, mask)

    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, WIDTH), torch.ones(2, 5)
    program = captured(Masked(pair).requires_grad_(False), x, mask)
    x[0, 0, 3], x[1, 4, 7], mask[1, 4] = 40.0, -3000.0, 0.0
    for mask_input, largest in (("mask", 80.0), (None, 6000.0)):
        after, _ = carried_out(program, plan_for(program, "static"), x, mask, mask_input=mask_input)
        (constant,) = [v for k, v in after.constants.items() if "input_scale" in k]
        assert float(constant) == pytest.approx(largest / 448, rel=1e-6)


@pytest.mark.parametrize("form", ["rowwise", "tensorwise", "storage"])
@pytest.mark.parametrize("format_", ["fp8", "int8"])
def test_rows_of_zeros_and_of_denormals_stay_finite(form: str, format_: Format) -> None:
    module = net(lambda n, x: n.b(x))
    module.b.weight[3], module.b.weight[5] = 0.0, 1e-41
    before = captured(module, torch.randn(2, 5, WIDTH))
    after = quantized_by_plan(before, form, format_)
    x = torch.randn(2, 5, WIDTH)
    x[0, 1], x[0, 2] = 0.0, 1e-42
    found = outputs(after, x)[0]
    assert found.isfinite().all()
    assert not found[..., 3].any()
    assert not found[0, 1].any()
    known = weight_expressions(after)
    made = [n for n in calls(after, own.dynamic_scale.default) if n in known]
    assert all((weight_value(after, node) >= SMALLEST_SCALE).all() for node in made)


def test_plans_that_do_not_fit_are_refused() -> None:
    before = program_of(pair)
    context = PassContext(plan=plan_for(before, "rowwise", "int8"))
    with pytest.raises(PassError, match="format: it is for int8, and fp8 is asked for"):
        rewritten(before, "fp8-matmul", context)
    planned = structural_copy(before)
    attach_plan(planned, plan_for(before, "rowwise", "int8"))
    with pytest.raises(PassError, match="the plan is for int8, and fp8-matmul carries out fp8"):
        rewritten(planned, "fp8-matmul")
    context = PassContext(plan=plan_for(before, "rowwise"))
    assert count(rewritten(before, "fp8-matmul", context)[0], "linear") == 0
    other = program_of(lambda n, x: n.a(x))
    with pytest.raises(PassError, match=r"names 1 layers that the program does not have: b "):
        carried_out(other, plan_for(before, "rowwise"))


def test_t5_works_where_casting_layer_by_layer_crashes() -> None:
    """Weights in fp8, cast to bf16 before each module runs and back after it: transformers' T5 asks
    for the dtype of `wo.weight` before that, and casts what `wo` reads to fp8."""
    model = seeded(T5EncoderModel, models.t5_config(layers=1))
    ids, mask = prompts(3, 7)
    cast = copy.deepcopy(model).to(torch.bfloat16)
    for module in cast.modules():
        if isinstance(module, nn.Linear):
            module.to(FP8)
            module.register_forward_pre_hook(lambda m, _: void(m.to(torch.bfloat16)))
            module.register_forward_hook(lambda m, *_: void(m.to(FP8)))
    with pytest.raises(RuntimeError, match=r"same dtype.*Float8_e4m3fn"), torch.no_grad():
        cast(ids, mask)
    program = captured(Text(model), ids, mask, dynamic=TOKENS)
    before, _ = rewritten(program, "unify-dtype{to=bf16},canonicalize,fuse-rms-norm")
    plan = plan_for(before, "storage")
    after, sites = carried_out(before, plan)
    assert any(site.module.endswith("wo") and site.rewritten for site in sites)
    reference, _ = rewritten(program, "unify-dtype{to=fp64}")
    inputs = prompts(4, 19)
    error = relative_error(outputs(after, *inputs)[0], outputs(reference, *inputs)[0])
    assert 0.02 < error < 0.12


def void(_: object) -> None:
    """A hook that returns something replaces what it was given."""


def test_golden_quantize_layers() -> None:
    for form, format_ in (("rowwise", "fp8"), ("storage", "fp8"), ("blocks of 4 bits", "int8")):
        before = program_of(pair)
        after = quantized_by_plan(before, form, format_)  # type: ignore[arg-type]
        name = f"{format_}_matmul_{form.replace(' ', '_')}.diff"
        golden.check(name, ir_diff(before, after))


def given_in_fp8(function: Callable[..., Any]) -> tuple[ExportedProgram, PassContext]:
    """A program whose `a` and table were widened from fp8, with the scales; `b` was not."""
    module, scales = net(function), {}
    for name in ("a.weight", "table.weight"):
        weight = module.get_parameter(name)
        scale = weight.abs().amax(1, keepdim=True) / 448
        scale = scale if name == "a.weight" else scale.amax()
        weight.copy_((weight / scale).clamp(-448, 448).to(FP8).float() * scale)
        scales[name] = scale
    inputs = torch.arange(10).reshape(2, 5)
    return captured(module, inputs, dynamic=TOKENS), PassContext(scales=scales)


def looked_up(net: Net, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = net.table(ids)
    return net.a(x), net.b(x), nn.functional.linear(x, net.a.weight * 0.25)


def test_given_weights_stay_what_they_are() -> None:
    """A weight that a pass scaled by a power of two has its own scale; linears of these are not
    merged."""
    program, context = given_in_fp8(looked_up)
    for dtype in ("fp32", "fp16"):
        scales = "" if dtype == "fp32" else "{scale_dtype=fp16}"
        unified = f"unify-dtype{{to={dtype}}},canonicalize,merge-linears"
        before, _ = rewritten(program, unified, context)
        after, _ = rewritten(before, f"plan-fp8{{mode=storage}},fp8-matmul{scales}", context)
        ids = torch.arange(6).reshape(2, 3)
        pairs = zip(outputs(before, ids), outputs(after, ids), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        quantized = [n for n in after.graph.nodes if n.target is own.quantize.default]
        assert len(quantized) == 3
        plan = plan_of(after)
        assert plan is not None
        assert not plan.rounds
        assert plan.notes == (
            "2 of 2 weights in fp8 are kept bit for bit, with the scales of the checkpoint",
        )
        kept = {layer.weight: layer.reason for layer in plan.layers if not layer.given}
        assert kept == {"b.weight": "the checkpoint does not hold it in fp8"}


def test_given_weights_that_cannot_stay() -> None:
    program, context = given_in_fp8(looked_up)
    with pytest.raises(PassError, match=r"need plan-fp8\{mode=storage\}"):
        rewritten(program, "plan-fp8", context)
    with pytest.raises(PassError, match=r"need plan-fp8\{mode=storage\}"):
        rewritten(program, "plan-int8{mode=storage}", context)
    wrong = replace(context, scales={**context.scales, "a.weight": torch.tensor(0.3)})
    after, _ = rewritten(program, "plan-fp8{mode=storage}", wrong)
    plan = plan_of(after)
    assert plan is not None
    assert "a.weight is widened: f8_e4m3fn does not hold it with one scale" in plan.notes[1]
    given = replace(context, plan=plan, scales={})
    with pytest.raises(
        PassError, match=r"keeps table.weight as its checkpoint has it, and no such"
    ):
        rewritten(program, "fp8-matmul", given)
