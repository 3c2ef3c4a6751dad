"""Programs of models that call torch.vmap."""

import torch
from torch import Tensor, nn

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.export import capture
from enginecast.capture.tracing.trace import LEVELS
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


def test_the_program_has_plain_ops_and_takes_several_cases_side_by_side() -> None:
    module = Masked().eval().requires_grad_(False)
    source = FactorySource("masked", module, {})
    captured = capture(source, SPECS, sample(SPECS, example_sizes(SPECS), 0))
    assert not any(node.target in LEVELS for node in captured.program.graph.nodes)
    names = tuple(spec.name for spec in captured.outputs)
    cases = [{"x": torch.randn(2, 7)}, {"x": torch.randn(4, 11)}, {"x": torch.randn(1, 1)}]
    for case, found in zip(
        cases, interpret_cases(captured.program, cases, names=names), strict=True
    ):
        torch.testing.assert_close(found[names[0]], module(**case))
