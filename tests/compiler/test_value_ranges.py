"""Which integers an engine takes: what the model takes, and not what the example held."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import enginecast
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import InputError, UsageError

pytestmark = pytest.mark.all_sizes


class Words(nn.Module):
    """Two tables; the positions are shifted as OPT shifts them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 4), nn.Embedding(30, 4)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        mixed: Tensor = torch.tanh(self.words(ids) + self.places(places + 2))
        return mixed


class Step(nn.Module):
    """A sinusoidal embedding of a diffusion step."""

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        angles = timestep[:, None].float() * torch.exp(-torch.arange(4) * 0.5)
        return x + torch.cat([angles.sin(), angles.cos()], -1)


def prepared(module: nn.Module, values: tuple[str, ...] = (), **example: Tensor) -> Prepared:
    options = ModelOptions(values=values)
    return prepare(open_source(module, example=example), options, Steps())


def limits(found: Prepared) -> dict[str, tuple[int | None, int | None]]:
    return {spec.name: (spec.low, spec.high) for spec in found.inputs if spec.is_whole}


X = torch.linspace(-1, 1, 16).reshape(2, 8)
IDS = torch.tensor([[0, 3, 1], [2, 4, 0]])


def test_tables_bound_their_indices() -> None:
    found = prepared(Words(), ids=IDS, places=torch.arange(3).repeat(2, 1))
    assert limits(found) == {"ids": (0, 49), "places": (-2, 27)}
    assert not found.captured.notes
    drawn = torch.cat([case.inputs["ids"].flatten() for case in found.cases])
    assert (int(drawn.min()), int(drawn.max())) == (0, 49)


def test_a_number_that_nothing_bounds_is_free_and_said_aloud() -> None:
    found = prepared(Step(), x=X, timestep=torch.tensor([500, 500]))
    assert limits(found) == {"timestep": (-1000, 1000)}
    [note] = found.captured.notes
    assert note.startswith("timestep takes values in -1000..1000 (the model sets no bound)")
    cases = {case.name: case.inputs["timestep"].unique().tolist() for case in found.cases}
    assert cases["lowest integers"] == [-1000]
    assert cases["highest integers"] == [1000]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("timestep=5", "expected NAME=MIN..MAX"),
        ("step=0..5", "no input 'step'; expected one of x, timestep"),
        ("x=0..5", "x is float32; only integer inputs have a range"),
        ("timestep=0..9", "timestep: expected values in 0..9, got 500"),
    ],
)
def test_values_that_are_refused(values: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        prepared(Step(), (values,), x=X, timestep=torch.tensor([500, 500]))
    assert message in refused.value.message


def test_an_engine_takes_other_values_than_the_example(tmp_path: Path) -> None:
    module, example = Step(), {"x": X, "timestep": torch.tensor([500, 500])}
    bundle = enginecast.compile(
        module, tmp_path / "bundle", example=example, values=["timestep=0..999"]
    )
    with enginecast.load(bundle.root) as engine:
        for step in (0, 1, 999):
            timestep = torch.tensor([step, 7])
            (got,) = engine.run({"x": X.numpy(), "timestep": timestep.numpy()}).values()
            np.testing.assert_allclose(got, module(X, timestep), rtol=1e-5, atol=1e-4)
        with pytest.raises(InputError, match=r"expected values in 0\.\.999, got 1000"):
            engine.run({"x": X.numpy(), "timestep": np.array([1000, 7])})


def step() -> tuple[nn.Module, dict[str, Tensor]]:
    return Step(), {"x": X, "timestep": torch.tensor([500, 500])}


def test_a_model_is_compared_again_in_what_its_engine_takes(tmp_path: Path) -> None:
    model, bundle = "test_value_ranges:step", tmp_path / "bundle"
    enginecast.compile(model, bundle, dynamic=["x:0=2..7"], values=["timestep=0..600"])
    check = enginecast.verify(bundle, model=model)
    assert check.verdict.outcome == "verified"
    narrower = enginecast.verify(bundle, model=model, dynamic=["timestep:0=3..4"])
    assert narrower.verdict.outcome == "verified"
    with pytest.raises(UsageError, match="go with --model"):
        enginecast.verify(bundle, values=["timestep=0..1"])
