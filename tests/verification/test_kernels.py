"""What kernels that add may lose is measured by their terms, not by a result that may be small."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.inputs.examples import Case
from enginecast.verification.eager.kernel_noise import UNIT, noisy_outputs
from enginecast.verification.eager.make_reference import make_reference
from enginecast.verification.eager.other_kernels import with_all_kernels
from enginecast.verification.engine import where_it_ran
from enginecast.verification.metrics import pool_output
from enginecast.verification.reference import Reference
from enginecast.verification.verdict import judge

WEIGHT = torch.randn(64, generator=torch.Generator().manual_seed(1))
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x.mean(-1),
    "std and mean": lambda x: torch.std_mean(x, -1)[1],
    "average pool": lambda x: torch.nn.functional.avg_pool1d(x, 64),
    "einsum": lambda x: torch.einsum("bi,i->b", x, WEIGHT),
    "product with a vector": lambda x: torch.mv(x, WEIGHT),
    "linear interpolation": lambda x: torch.lerp(x, -x, 0.49),
}


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": self.function(x)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_noise_is_that_of_the_terms(name: str) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    x[:, 1:] -= x[:, 1:].mean(-1, keepdim=True)
    x[:, 0] = 1e-4  # the mean is small beside what is added
    program = torch.export.export(Of(FUNCTIONS[name]), (x,))
    samples = [run[0]["y"] for run in noisy_outputs(program, [{"x": x}], ["y"])]
    noise = (torch.stack(samples) - FUNCTIONS[name](x)).abs().mean() / UNIT
    terms = {"einsum": 8.0, "product with a vector": 8.0, "linear interpolation": 1.0}
    assert 0.2 * terms.get(name, 1 / 8) < noise < 6 * terms.get(name, 1 / 8)


@pytest.mark.parametrize(("channels", "least", "most"), [(8, 1.0, 2.5), (1024, 7.0, 12.0)])
def test_noise_of_long_sums_of_convolutions(channels: int, least: float, most: float) -> None:
    weight = torch.randn(4, channels, 3, generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, channels, 40, generator=torch.Generator().manual_seed(2))
    convolve = torch.nn.functional.conv1d
    program = torch.export.export(Of(lambda x: convolve(x, weight)), (x,))
    samples = [run[0]["y"] for run in noisy_outputs(program, [{"x": x}], ["y"])]
    terms = convolve(x.square(), weight.square()).sqrt()
    noise = ((torch.stack(samples) - convolve(x, weight)) / terms).square().mean().sqrt() / UNIT
    assert least < noise < most


def test_large_cases_are_run_with_noise_where_an_engine_needs_it() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 8
    module = Of(lambda x: torch.tanh(x @ weight) @ weight)
    case = Case("large", {"x": torch.linspace(-2, 2, 64).repeat(32, 1)})
    program = torch.export.export(module, (case.inputs["x"],))
    before = make_reference(
        program,
        lambda dtype: module,
        [case],
        dtype="fp32",
        names=["y"],
        forward=lambda model, inputs: {"y": model(**inputs)["y"]},
        work=0,
    )
    assert not before.floor.kernels
    after = with_all_kernels(before, program, [case], [], ["y"])
    [exact] = [stored.reference["y"].astype(np.float64) for stored in after.cases]
    kernels = pool_output(after.floor.kernels or {}, "y").relative
    assert kernels > 1.3 * before.floor.of("y")

    def outcome(reference: Reference, error: float) -> str:
        found = {"large": reference.compare(reference.cases[0], {"y": exact * (1 + error)})}
        return judge(found, reference.floor, where=where_it_ran(), engine_ran=True).outcome

    assert [outcome(found, 2.6 * kernels) for found in (before, after)] == ["rejected", "verified"]
    assert outcome(after, 3.1 * kernels) == outcome(after, 1e-3) == "rejected"
