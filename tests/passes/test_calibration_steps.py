"""Steps of a denoiser that differ: a plan is measured on early, middle and late ones."""

from collections.abc import Sequence

import pytest
import torch
from programs import captured, outputs, rewritten
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.capture.sources.calls.recording import Recorded, record
from enginecast.passes.ir.base import PassContext

STEPS = 9


class Denoiser(nn.Module):
    """Late steps make a few hidden units as loud as those of trained transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.out = nn.Linear(32, 32)
        self.loud = nn.Buffer(torch.zeros(64))
        with torch.no_grad():
            self.loud[[3, 17, 40]] = 80.0
            self.down.weight[:, [3, 17, 40]] *= 0.1

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        late = torch.sigmoid((400.0 - timestep) / 50.0)
        hidden = torch.relu(self.up(x)) * (1.0 + late * self.loud)
        found: Tensor = torch.tanh(self.out(x + self.down(hidden)))
        return found


@pytest.fixture(scope="module")
def calls() -> tuple[Denoiser, Recorded]:
    torch.manual_seed(0)
    model = Denoiser().eval().requires_grad_(False)
    x = torch.randn(2, 12, 32)
    with record({"denoiser": model}) as found:
        for step in range(STEPS):
            x = x - 0.1 * model(x, torch.tensor(999.0 * (1 - step / (STEPS - 1))))
    return model, found["denoiser"]


def program_of(model: Denoiser, call: Recorded) -> ExportedProgram:
    return captured(model, *call.example.values())


def context(call: Recorded, *places: int) -> PassContext:
    some = [call.calls[place] for place in places]
    return PassContext(calibration=some, names=[call.names[place] for place in places])


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    [one], [other] = found, wanted
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max())


def test_static_scales_of_early_steps_alone_are_wrong_for_late_ones(
    calls: tuple[Denoiser, Recorded],
) -> None:
    model, call = calls
    program, late = program_of(model, call), list(call.calls[-1].values())
    exact = outputs(program, *late)
    errors = {}
    for name, places in {"early": (0,), "late": (2,), "all": (0, 1, 2)}.items():
        spec = "plan-int8{static=true max_error=0.5},int8-matmul"
        quantized, _ = rewritten(program, spec, context(call, *places))
        errors[name] = error(outputs(quantized, *late), exact)
    assert errors["early"] > 0.3  # the loud units are clamped
    assert errors["all"] == errors["late"] < 0.15
