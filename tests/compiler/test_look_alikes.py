"""Dimensions of one size in the example: which are one dimension is what the model's code says."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import enginecast
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.prepare.open_model import ModelInputs, input_specs

Sizes = dict[str, list[str | int]]


class Of(nn.Module):
    """A function of two inputs or three."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function


class Two(Of):
    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.function(x, y)


class Three(Of):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> object:
        return self.function(x, y, z)


def settled(
    function: Callable[..., object] | nn.Module, *shapes: Sequence[int], dynamic: Sequence[str] = ()
) -> ModelInputs:
    names = "xyz"[: len(shapes)]
    example = {name: torch.rand(*shape) for name, shape in zip(names, shapes, strict=True)}
    module = function
    if not isinstance(module, nn.Module):
        module = Two(function) if len(shapes) == 2 else Three(function)
    return input_specs(open_source(module, example=example), None, dynamic)


def sizes(found: ModelInputs) -> Sizes:
    return {spec.name: [dim.name or dim.size for dim in spec.dims] for spec in found.specs}


def layers(x: Tensor, state: Tensor) -> Tensor:
    return x + state[0] + state[1]


def scaled(boxes: Tensor, size: Tensor) -> Tensor:
    return boxes * torch.stack([size[1], size[0], size[1], size[0]])


def pairs(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([a * b for a, b in zip(x, y, strict=False)])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, num_layers=2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(x, y)  # type: ignore[no-any-return]


B = "batch"
DEFAULTS: dict[str, tuple[object, list[list[int]], list[list[str | int]]]] = {
    "layers": (layers, [[2, 8], [2, 2, 8]], [[B, 8], [2, B, 8]]),
    "gru": (Recurrent(), [[2, 5, 6], [2, 2, 8]], [[B, 5, 6], [2, B, 8]]),
    "transposed": (lambda x, y: x + y.T, [[4, 4], [4, 4]], [[B, 4], [4, B]]),
    "pairs": (pairs, [[3, 6], [3, 6]], [[B, 6], [B, 6]]),
    "height and width": (scaled, [[2, 6, 4], [2]], [[B, 6, 4], [2]]),
    "size first": (lambda x, y: scaled(y, x), [[2], [2, 6, 4]], [[2], [B, 6, 4]]),
    "weights": (lambda x, y: x @ y, [[4, 4], [4, 4]], [[B, 4], [4, 4]]),
    "memory": (lambda x, y: (x @ y.T).softmax(1) @ y, [[4, 8], [4, 8]], [[B, 8], ["y_0", 8]]),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_dimensions_are_tied_where_the_code_needs_them_equal(name: str) -> None:
    function, shapes, expected = DEFAULTS[name]
    found = settled(function, *shapes)  # type: ignore[arg-type]
    assert list(sizes(found).values()) == expected


ASKED: dict[str, tuple[object, list[list[int]], str, list[list[str | int]]]] = {
    "layers": (
        layers,
        [[2, 8], [2, 2, 8]],
        "x:0=b:2..8 y:1=b y:0=2",
        [["b", 8], [2, "b", 8]],
    ),
    "tied": (lambda x, y: x @ y.T, [[4, 8], [4, 8]], "y:0=batch", [[B, 8], [B, 8]]),
    "fixed": (lambda x, y: x * y, [[4, 8], [4, 8]], "y:0=3", [[3, 8], [3, 8]]),
    "cache": (
        lambda x, y, z: F.scaled_dot_product_attention(z, x, y),
        [[2, 6, 8], [2, 6, 8], [2, 1, 8]],
        "x:1=1..16",
        [[B, "x_1", 8], [B, "x_1", 8], [B, 1, 8]],
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_the_user_asks_for_wins(name: str) -> None:
    function, shapes, dynamic, expected = ASKED[name]
    found = settled(function, *shapes, dynamic=dynamic.split())  # type: ignore[arg-type]
    assert list(sizes(found).values()) == expected


def test_code_that_compares_the_batches_is_published_in_the_example_s_sizes(tmp_path: Path) -> None:
    module = Two(lambda x, y: (x, y) if len(x) == len(y) else (x * 2, y))
    example = {"x": torch.rand(4, 6), "y": torch.rand(4, 6)}
    bundle = enginecast.compile(module, tmp_path / "bundle", example=example)
    assert [list(i.shape) for i in bundle.manifest.inputs] == [[4, 6], [4, 6]]
