"""Models in fp64: their engines compute in less, which is said, and is refused where it matters."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from enginecast.api import compile as export
from enginecast.compiler.steps import Steps
from enginecast.errors import VerificationError
from enginecast.runtime.load import load


class Cancels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1e5) - 1e5


def test_an_engine_in_less_is_said_aloud(tmp_path: Path) -> None:
    steps = Steps()
    x = torch.randn(3, 4, dtype=torch.float64)
    export(nn.Linear(4, 4).double().eval(), tmp_path / "bundle", example={"input": x}, steps=steps)
    assert any("computes in fp64 (weight is float64)" in line for line in steps.lines)


@pytest.mark.parametrize(("module", "does"), [(Cancels, "is off by")])
def test_a_model_that_needs_fp64_is_not_converted(
    module: type[nn.Module], does: str, tmp_path: Path
) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    said = f"the model computes in fp64, and eager fp32 {does}"
    with pytest.raises(VerificationError, match=said):
        export(module(), tmp_path / "bundle", example={"x": x})
    assert not (tmp_path / "bundle").exists()


class Sensitive(nn.Module):
    """Wholly in fp64, by buffers and parameters; inputs in fp32 are cast or promoted."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("offset", torch.full((4,), 1e8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear((x + self.offset) - self.offset)
        return found


def test_a_model_in_fp64_that_takes_fp32_computes_in_fp64(tmp_path: Path) -> None:
    module, x = Sensitive(), torch.randn(3, 4)
    with torch.no_grad():
        wanted = module(x)
    export(module, tmp_path / "bundle", example={"x": x})
    with load(tmp_path / "bundle") as engine:
        found = torch.from_numpy(engine.run({"x": x.numpy()})["output_0"])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
