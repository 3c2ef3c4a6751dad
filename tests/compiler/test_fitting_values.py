"""Values that must fit one another: what is drawn holds what the model's code needs of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import enginecast
from enginecast.capture.inputs.examples import sample
from enginecast.capture.inputs.specs import Draws, InputSpec
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.prepare.open_model import input_specs
from enginecast.compiler.ranges.fit_values import fit_values

IDS = torch.tensor([[1, 7, 7, 2, 3, 4, 5, 6, 8], [9, 7, 7, 1, 2, 3, 4, 5, 6]])
WEIGHT = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))


class Of(nn.Module):
    """A function of two inputs."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(WEIGHT)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


def bag(ids: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(ids, WEIGHT, offsets, mode="mean")


def written(ids: Tensor, image: Tensor) -> Tensor:
    embedded = F.embedding(ids, WEIGHT).clone()
    embedded[ids == 7] = image
    return embedded


def selected(x: Tensor, keep: Tensor) -> Tensor:
    return x[keep].view(len(x), 3)


def segments(x: Tensor, ends: Tensor) -> Tensor:
    counts = ends.diff()
    return x * torch.arange(len(counts)).repeat_interleave(counts, output_size=len(x))[:, None]


def entropy(x: Tensor, p: Tensor) -> Tensor:
    torch._assert_async(((p.sum(-1) - 1).abs() < 1e-3).all(), "rows must sum to 1")
    return x - (p * p.log()).sum(-1)


def areas(x: Tensor, boxes: Tensor) -> Tensor:
    torch._assert_async((boxes[:, 2:] > boxes[:, :2]).all(), "boxes must have an area")
    return x * (boxes[:, 2:] - boxes[:, :2]).prod(-1)


def inverse(x: Tensor, order: Tensor) -> Tensor:
    torch._assert_async((order.sort().values == torch.arange(len(order))).all(), "no permutation")
    return x[:, order.argsort()]


POSITIVE = torch.stack([torch.eye(4) * 2, torch.ones(4, 4) + torch.eye(4), torch.eye(4)])
KEEP = torch.tensor([[1, 0, 1, 0, 1], [0, 1, 1, 1, 0]]).bool()
BOXES = torch.tensor([[0.1, 0.2, 0.5, 0.6], [0.3, 0.1, 0.9, 0.4], [0.0, 0.0, 1.0, 1.0]])
BOUND: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor, tuple[Draws, Draws]]] = {
    "offsets": (bag, torch.arange(9), torch.tensor([0, 2, 5]), ("any", "between")),
    "ends": (segments, torch.rand(9, 2), torch.tensor([0, 2, 5, 9]), ("any", "between")),
    "images": (written, IDS, torch.rand(4, 8), ("marked", "any")),
    "mask": (selected, torch.rand(2, 5), KEEP, ("any", "marked")),
    "probabilities": (entropy, torch.rand(3), torch.rand(3, 5).softmax(-1), ("any", "shuffled")),
    "boxes": (areas, torch.rand(3), BOXES, ("any", "rows")),
    "permutation": (inverse, torch.rand(2, 4), torch.tensor([2, 0, 3, 1]), ("any", "shuffled")),
    "positive": (lambda x, y: x + torch.linalg.cholesky(y), POSITIVE, POSITIVE, ("any", "samples")),
    "one matrix": (
        lambda x, y: x @ torch.linalg.cholesky(y),
        torch.rand(2, 4),
        POSITIVE[1],
        ("any", "kept"),
    ),
    "free": (lambda x, y: x * y, torch.rand(2, 4), torch.arange(4), ("any", "any")),
}


def fitted(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    example = {"x": x, "y": y}
    source = open_source(Of(function), example=example)
    return fit_values(source, input_specs(source, None, ()).specs, example)


@pytest.mark.parametrize("name", BOUND)
def test_values_are_drawn_as_freely_as_the_model_takes_them(name: str) -> None:
    function, x, y, expected = BOUND[name]
    specs, notes = fitted(function, x, y)
    assert tuple(spec.draws for spec in specs) == expected
    assert len(notes) == sum(draws != "any" for draws in expected)
    drawn = [sample(specs, {"batch": len(x)}, seed) for seed in range(20)]
    for inputs in drawn:
        function(inputs["x"], inputs["y"])
    if "kept" not in expected:
        assert any(not torch.equal(d["x"], x) and not torch.equal(d["y"], y) for d in drawn)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 6, mode="mean")

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(ids, offsets)  # type: ignore[no-any-return]


def test_offsets_are_published_with_what_was_compared(tmp_path: Path) -> None:
    example = {"ids": torch.arange(9), "offsets": torch.tensor([0, 2, 5])}
    bundle = enginecast.compile(Bag(), tmp_path / "b", example=example)
    [ids, offsets] = bundle.manifest.inputs
    assert offsets.shape == (3,)
    assert (ids.minimum, ids.maximum) == (0, 49)
    assert any("values of offsets are sorted, with the ends" in n for n in bundle.manifest.notes)


class Searched(nn.Module):
    def forward(self, x: Tensor, bounds: Tensor) -> Tensor:
        return torch.searchsorted(bounds, x)


def test_what_is_searched_in_is_drawn_sorted(tmp_path: Path) -> None:
    example = {"x": torch.randn(3, 7), "bounds": torch.tensor([-1.0, -0.2, 0.1, 0.9])}
    bundle = enginecast.compile(Searched(), tmp_path / "b", example=example)
    assert any("are sorted, as in the example" in note for note in bundle.manifest.notes)
