"""Names of outputs, and exports of what models return besides plain float tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import enginecast
from enginecast.capture.outputs.flatten import (
    free_names,
    name_result,
)
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import CaptureError

Form = Callable[[Tensor, Tensor, Tensor, Tensor], object]


class Returns(nn.Module):
    """Two linears; what is returned of their values `hidden` and `y` is up to `form`."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 60)
        self.second = nn.Linear(60, 7)
        self.form = form

    def forward(self, x: Tensor, mask: Tensor) -> object:
        hidden = self.first(x) * mask[:, None]
        return self.form(x, mask, hidden, self.second(hidden))


def example() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 6), "mask": torch.tensor([1, 0, 1])}


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Answer:
    logits: Tensor
    past: object = None


class Thing:
    """No tensor, and no container of tensors."""


FORMS: dict[str, tuple[Form, dict[str, tuple[str, list[int]]]]] = {
    "inputs handed through, integers, scalars": (
        lambda x, mask, h, y: {
            "x": x,
            "mask": mask,
            "copy": x,
            "ids": y.argmax(-1),
            "above": y > 0,
            "loss": y.pow(2).mean(),
            "count": mask.sum(),
        },
        {
            "x_out": ("float32", [5, 6]),
            "mask_out": ("int64", [5]),
            "copy": ("float32", [5, 6]),
            "ids": ("int64", [5]),
            "above": ("bool", [5, 7]),
            "loss": ("float32", []),
            "count": ("int64", []),
        },
    ),
    "names that collide, nothing in places, no batch": (
        lambda x, mask, h, y: {
            "mask": h,
            "a": (y,),
            "a.0": h + 1,
            "none": None,
            "empty": (),
            "deep": {"t": (y * 2, {"u": [h]})},
            "mean": y.mean(0),
            "steps": torch.arange(4),
            "turned": y.T,
        },
        {
            "mask_out": ("float32", [5, 60]),
            "a.0": ("float32", [5, 7]),
            "a.0_2": ("float32", [5, 60]),
            "deep.t.0": ("float32", [5, 7]),
            "deep.t.1.u.0": ("float32", [5, 60]),
            "mean": ("float32", [7]),
            "steps": ("int64", [4]),
            "turned": ("float32", [7, 5]),
        },
    ),
    "one tensor under two names": (
        lambda x, mask, h, y: Pair(y, y),
        {"left": ("float32", [5, 7]), "right": ("float32", [5, 7])},
    ),
    "nothing but an input": (lambda x, mask, h, y: [x], {"output_0": ("float32", [5, 6])}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_export_and_verify(tmp_path: Path, name: str) -> None:
    form, expected = FORMS[name]
    module = Returns(form)
    bundle = enginecast.compile(module, tmp_path / "b", example=example(), threads=1)
    assert [output.name for output in bundle.manifest.outputs] == list(expected)
    assert enginecast.verify(bundle.root, threads=1).verdict.outcome == "verified"
    inputs = {"x": torch.randn(5, 6), "mask": torch.tensor([1, 1, 0, 1, 1])}
    with enginecast.load(bundle.root, threads=1) as engine:
        outputs = engine.run({key: tensor.numpy() for key, tensor in inputs.items()})
    eager = list(name_result(module(**inputs)).tensors.values())
    for (output, (dtype, shape)), wanted in zip(expected.items(), eager, strict=True):
        assert (outputs[output].dtype.name, list(outputs[output].shape)) == (dtype, shape)
        np.testing.assert_allclose(outputs[output], wanted.detach(), rtol=1e-5, atol=1e-6)


def test_complex_outputs_are_pairs(tmp_path: Path) -> None:
    module = Returns(lambda x, mask, h, y: {"y": y, "turned": torch.complex(y, y * 2).conj()})
    bundle = enginecast.compile(module, tmp_path / "b", example=example())
    [note] = bundle.manifest.notes
    assert note.startswith(
        "turned: complex in the model, and real and imaginary parts side by side"
    )
    y, turned = bundle.manifest.outputs
    assert turned.shape == (*y.shape, 2)


REFUSED: dict[str, tuple[Form, str]] = {
    "text": (lambda x, mask, h, y: {"y": y, "n": "spam"}, "a str as n"),
    "object": (lambda x, mask, h, y: Answer(y, (Thing(),)), r"a Thing as past\.0"),
}


def prepared(module: nn.Module, *outputs: str) -> Prepared:
    options = ModelOptions(outputs=outputs)
    return prepare(open_source(module, example=example()), options, Steps())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_a_tensor_is_refused_with_the_way_out(name: str) -> None:
    form, message = REFUSED[name]
    with pytest.raises(CaptureError, match=f"the model returns {message}, expected") as refused:
        prepared(Returns(form))
    way_out = refused.value.hint
    assert way_out in ("Leave it out: --outputs y.", "Leave it out: --outputs logits.")
    kept = way_out.split()[-1].rstrip(".")
    assert prepared(Returns(form), kept).output_names == (kept,)


@pytest.mark.parametrize(
    ("names", "inputs", "free"),
    [
        (["a", "b"], [], ["a", "b"]),
        (["x", "y"], ["x"], ["x_out", "y"]),
        (["x", "x_out"], ["x"], ["x_out_2", "x_out"]),  # who has a free name keeps it
        (["a", "a", "a"], [], ["a", "a_2", "a_3"]),
        (["a", "a", "a_2"], [], ["a", "a_3", "a_2"]),
        (["x", "x"], ["x", "x_out"], ["x_out_2", "x_out_3"]),
    ],
)
def test_names_that_collide(names: list[str], inputs: list[str], free: list[str]) -> None:
    assert free_names(names, inputs) == free


def test_an_input_that_no_kept_output_needs_stays_an_input(tmp_path: Path) -> None:
    module = Returns(lambda x, mask, h, y: {"y": y, "double": x * 2})
    notes = prepared(module, "double").captured.notes
    assert notes == ("no output needs the input 'mask', but the engine takes it",)
    assert prepared(module, "y").captured.notes == ()
    bundle = enginecast.compile(module, tmp_path / "b", example=example(), outputs=["double"])
    assert [spec.name for spec in bundle.manifest.inputs] == ["x", "mask"]
    x = np.ones((2, 6), np.float32)
    with enginecast.load(bundle.root) as engine:
        outputs = engine.run({"x": x, "mask": np.ones(2, np.int64)})
    assert list(outputs) == ["double"]
    np.testing.assert_array_equal(outputs["double"], 2 * x)
