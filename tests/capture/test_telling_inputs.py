"""Outputs that are zero or empty in all cases get one in which they are not."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

import enginecast
from enginecast.capture.inputs.examples import Case
from enginecast.capture.inputs.specs import from_example
from enginecast.compiler.prepare.cases import with_telling_values
from enginecast.verification.eager.outputs import reference_program
from enginecast.verification.runs import Runs

pytestmark = pytest.mark.all_sizes

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Far(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x > 1e5, (x - 200).relu(), x * 2


class Never(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x != x,)


class Mostly(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return ((x - 50).log().topk(2).values,)


@pytest.mark.parametrize(
    ("module", "names", "told"), [(Far, "abc", "ab"), (Never, "a", ""), (Mostly, "a", "a")]
)
def test_a_case_is_added_for_outputs_that_are_zero(
    module: type[nn.Module], names: str, told: str
) -> None:
    program = export(module(), (X,))
    cases = (Case("first", {"x": X}),)
    runs = Runs(lambda: program, tuple(names))
    found = with_telling_values(runs, from_example({"x": X}), cases, tuple(names))
    assert found[0] == cases[0]
    shown = [program.module()(case.inputs["x"]) for case in found]
    for place, name in enumerate(names):
        other = any(bool(outputs[place].nan_to_num().any()) for outputs in shown[1:])
        assert other == (name in told) or name == "c"
    assert len(found) == 1 or told


class Cancelling(nn.Module):
    """Keeps far values, and very large ones only where they are exact enough."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x[(x.abs() > 20) & ((x + 0.01) - x > 0.005)],)


def test_inputs_at_which_rounding_decides_a_size_are_not_taken() -> None:
    program = export(Cancelling(), (X,))
    exact, plain = Runs(partial(reference_program, program), "a"), Runs(lambda: program, "a")
    cases, specs = (Case("first", {"x": X}),), from_example({"x": X})
    assert with_telling_values(exact, specs, cases, "a")[1].inputs["x"].abs().max() > 1e5
    _, added = with_telling_values(exact, specs, cases, "a", plain=plain)
    [wide], [found] = (runs.outputs([added.inputs]) for runs in (exact, plain))
    assert wide["a"].shape == found["a"].shape
    assert found["a"].numel() > 0


class OfProbabilities(nn.Module):
    """Raises an error for any other values."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy(x, y)


def test_floats_are_the_examples_where_the_model_refuses_others(tmp_path: Path) -> None:
    example = {name: torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) for name in "xy"}
    bundle = enginecast.compile(OfProbabilities(), tmp_path / "b", example=example)
    found, *_ = bundle.manifest.notes
    assert found.startswith("the compared values of x are values of the example: the model refuses")


class OfPositives(nn.Module):
    """Asserts it, which is a branch on a value."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.min() >= 0
        return x.sqrt()


@pytest.mark.slow
def test_floats_are_the_examples_where_the_model_asserts_something_of_them(tmp_path: Path) -> None:
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    bundle = enginecast.compile(OfPositives(), tmp_path / "b", example={"x": x})
    assert any("are values of the example" in note for note in bundle.manifest.notes)
