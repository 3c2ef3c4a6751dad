"""Where eager fp32 is far off fp64, for the model jumps or cancels, eager is the measure."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from program_edits import WHERE
from torch import Tensor, nn

from enginecast.capture.inputs.examples import Case
from enginecast.verification.eager.make_reference import make_reference
from enginecast.verification.eager.outputs import as_arrays
from enginecast.verification.metrics import NOT_FINITE
from enginecast.verification.reference import Reference, read_reference, write_reference
from enginecast.verification.verdict import judge

Function = Callable[[Tensor], Tensor]


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


GRID = torch.arange(-40, 40).reshape(10, 8) / 10
WEIGHT = torch.linspace(-1, 1, 64).reshape(8, 8)
MODELS: dict[str, tuple[Function, Function]] = {
    "cancels": (lambda x: (x + 1e6) - 1e6, lambda x: x),
    "scales": (lambda x: (x * (1 + 4e-6) - x) * 1e5, lambda x: x * 0.4),
    "jumps": (lambda x: x // 0.1, lambda x: (x / 0.1).floor()),
    "rests": (lambda x: x % 0.1, lambda x: x % 0.1 * 1.001),
    "compares": (lambda x: x % 0.1 == 0, lambda x: x.double() % 0.1 == 0),
    "overflows": (lambda x: (x * 1e5).half().float(), lambda x: (x * 1e5).clamp(-65504, 65504)),
    "after a product": (lambda x: (x @ WEIGHT + 1e5) - 1e5, lambda x: x @ WEIGHT),
}
"""A function, and what an engine may make of it that would be wrong."""


def reference_of(function: Function) -> Reference:
    module = Of(function)
    return make_reference(
        torch.export.export(module, (GRID,)),
        lambda dtype: module,
        [Case("grid", {"x": GRID})],
        dtype="fp32",
        names=["y"],
        forward=lambda model, inputs: {"y": model(inputs["x"])},
    )


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_has_to_do_as_eager_does(name: str) -> None:
    function, other = MODELS[name]
    reference = reference_of(function)
    [case] = reference.cases
    # A rounding to fp16 is in the fp64 program, too: there fp64 has the same infinities.
    assert list(reference.floor.by_eager) == ["y"] * (name != "overflows")
    verdicts = [
        judge(
            {"grid": reference.compare(case, as_arrays({"y": found}))},
            reference.floor,
            where=WHERE,
            engine_ran=True,
        )
        for found in (function(GRID), other(GRID).to(function(GRID).dtype))
    ]
    assert [verdict.outcome for verdict in verdicts] == ["verified", "rejected"]
    assert ("compared with eager itself" in " ".join(verdicts[0].reasons)) is (name != "overflows")


def test_an_infinity_of_eager_alone_is_stored(tmp_path: Path) -> None:
    reference = reference_of(lambda x: (x + 1) * 3e38 * 1e3)
    assert reference.floor.by_eager == {"y": NOT_FINITE}
    write_reference(tmp_path / "reference.safetensors", reference)
    stored = read_reference(tmp_path / "reference.safetensors")
    assert stored.floor.by_eager == reference.floor.by_eager
