"""Code that can tell a trace from eager: its engine does what eager does, or is not published."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import enginecast
from enginecast.api import compile as export
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.prepare.program import prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import VerificationError

FAR = 1e5
"""Beyond every value that an engine is compared on."""


class Exporting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return x.clamp(-FAR, FAR) + 1
        return x + 1


class RaisesTraced(nn.Module):
    """As a model does that takes no mask, which its library makes in a trace alone."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros(x.shape[0], 7) if torch.compiler.is_exporting() else None
        return x.clamp(-FAR, FAR) + 1 if mask is None else x + mask


class Typed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is torch.Tensor:
            return x.clamp(-FAR, FAR) + 1  # typed
        return x + 1


class AsksForModes(nn.Module):
    """In eager there is none; enginecast's own comparison is one."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is None:
            return x + 1
        return x.clamp(-FAR, FAR) + 1


@pytest.mark.parametrize(
    "make",
    [Exporting, RaisesTraced],
)
def test_questions_are_answered_as_eager_answers_them(
    make: type[nn.Module], tmp_path: Path
) -> None:
    module = make().eval()
    export(module, tmp_path / "out", example={"x": torch.randn(3, 4)})
    x = torch.full((2, 4), 1e7)
    with enginecast.load(tmp_path / "out", threads=1) as engine:
        found = engine.run({"x": x.numpy()})["output_0"]
    np.testing.assert_array_equal(found, module(x).numpy())


@pytest.mark.parametrize(
    "make",
    [Typed, AsksForModes],
)
def test_other_operators_on_real_tensors_are_an_unverified_branch(
    make: type[nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(VerificationError, match=r"unverified branch: .*test_traced_code.py:\d+"):
        export(make().eval(), tmp_path / "out", example={"x": torch.randn(3, 4)})
    assert not (tmp_path / "out").exists()


class OneHot(nn.Module):
    """Torch looks for the largest class in eager alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(x, 6)


class InNumpy(nn.Module):
    """Dynamo translates what eager computes outside of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))


@pytest.mark.parametrize("make", [OneHot, InNumpy])
def test_what_only_torch_does_otherwise_is_captured(make: type[nn.Module]) -> None:
    x = torch.tensor([1, 0, 5]) if make is OneHot else torch.ones(2, 3)
    found = prepare(open_source(make(), example={"x": x}), ModelOptions(), Steps())
    assert not found.unverified
    [output] = found.captured.program.module()(x=x).values()
    assert output.allclose(make()(x))


class TypedBehind(nn.Module):
    """Tells a trace from eager behind an operator of torch's own."""

    def __init__(self, makes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.makes = makes

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.makes(x)
        if type(x) is torch.Tensor:
            return x
        return x.clamp(-FAR, FAR)


class AskingBehind(TypedBehind):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.makes(x)
        if not torch.compiler.is_exporting():
            x = x.clamp(-FAR, FAR)
        return x + 1


def grid(x: Tensor) -> Tensor:
    return torch.linspace(0, 1, x.shape[0])[:, None]


@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_what_comes_behind_an_operator_of_torch_is_looked_at(tmp_path: Path) -> None:
    example = {"x": torch.randn(3, 4)}
    with pytest.raises(VerificationError, match=r"unverified branch: .*test_traced_code.py:\d+"):
        export(TypedBehind(grid).eval(), tmp_path / "out", example=example)
    module = AskingBehind(grid).eval()
    export(module, tmp_path / "out", example=example)
    x = torch.full((3, 4), 1e7)
    with enginecast.load(tmp_path / "out", threads=1) as engine:
        found = engine.run({"x": x.numpy()})["output_0"]
    with torch.no_grad():
        np.testing.assert_allclose(found, module(x).numpy(), rtol=1e-6)
