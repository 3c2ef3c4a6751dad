"""Programs of models that call torch.vmap."""

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch._ops import OpOverload
from torch.export import ExportedProgram

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.captured import capture
from enginecast.errors import CaptureError
from enginecast.passes.ir.interpret import interpret_cases

DIMS = (DimSpec("batch", 3, 1, 9), DimSpec("rows", 5, 1, 40))
SPECS = (InputSpec("x", "tensor", torch.float32, DIMS),)


class Masked(nn.Module):
    """Builds a mask from indices with vmap, as transformers does where masks are combined."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[1])

        def near(left: Tensor, right: Tensor) -> Tensor:
            return ((left - right).abs() < 3) & (left >= right)

        mask = torch.vmap(torch.vmap(near, (None, 0)), (0, None))(rows, rows)
        weights = mask.to(x.dtype) / mask.sum(-1, keepdim=True)
        result: Tensor = self.scale((x @ weights.T).reshape(x.shape[0], -1, 1))
        return result


def calls(program: ExportedProgram) -> list[object]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


class Tangent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]
        return result


class Gradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.func.grad(lambda y: y.square().sum())(x)
        return result


@pytest.mark.slow
def test_jvp_is_captured_and_what_fails_leaves_no_level_open() -> None:
    captured = capture(FactorySource("t", Tangent(), {}), SPECS, {"x": torch.randn(3, 5)})
    x = torch.randn(2, 7)
    [found] = captured.program.module()(x=x).values()
    torch.testing.assert_close(found, x.cos())
    assert captured.unlike_eager == ""
    with pytest.raises(CaptureError):
        capture(FactorySource("g", Gradient(), {}), SPECS, {"x": torch.randn(3, 5)})
    assert get_dynamic_layer_stack_depth() == 0


def test_the_program_has_plain_ops_and_takes_several_cases_side_by_side() -> None:
    module = Masked().eval().requires_grad_(False)
    source = FactorySource("masked", module, {})
    captured = capture(source, SPECS, sample(SPECS, example_sizes(SPECS), 0))
    assert all(isinstance(target, OpOverload) for target in calls(captured.program))
    names = tuple(spec.name for spec in captured.outputs)
    cases = [{"x": torch.randn(2, 7)}, {"x": torch.randn(4, 11)}, {"x": torch.randn(1, 1)}]
    for case, found in zip(
        cases, interpret_cases(captured.program, cases, names=names), strict=True
    ):
        torch.testing.assert_close(found[names[0]], module(**case))


class Jacobian(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.func.jacfwd(torch.sin)(x)
        return result


def test_a_trace_that_fails_leaves_no_dual_level_open() -> None:
    x, specs = torch.randn(3), (InputSpec("x", "tensor", torch.float32, (DimSpec(None, 3, 3, 3),)),)
    with pytest.raises(CaptureError, match=r"jacfwd"):
        capture(FactorySource("t", Jacobian(), {}), specs, {"x": x})
    torch.testing.assert_close(Jacobian()(x), x.cos().diag())
