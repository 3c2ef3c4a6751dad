"""Regions that compute the same with different weights, and those that only seem to."""

from collections.abc import Callable

import pytest
import torch
from programs import captured, rewritten
from torch import Tensor, nn
from torch.export import Dim

from enginecast.passes.ir.regions import Region, repeated_regions


class Mixer(nn.Module):
    """Two linears around a norm; the options are what may differ between two of them."""

    def __init__(
        self,
        hidden: int = 16,
        *,
        eps: float = 1e-5,
        factor: float = 1.0,
        axis: int = -1,
        write: bool = False,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(8, hidden)
        self.second = nn.Linear(hidden, 8)
        self.norm = nn.LayerNorm(8, eps=eps)
        self.factor, self.axis, self.write = factor, axis, write

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale = torch.nn.functional.silu(condition)[:, None]
        hidden = self.first(self.norm(x) * scale).softmax(self.axis)
        if self.write:
            hidden[:, 0] = 0.0
        result: Tensor = x + self.second(hidden) * self.factor
        return result.reshape(x.shape[0], -1, 8)


class Stack(nn.Module):
    """Mixers in turn; those at `twice` a second time, and from `cut` on of half the tokens."""

    def __init__(self, *mixers: nn.Module, twice: int = 0, cut: int | None = None) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixers)
        self.twice, self.cut = twice, cut

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for number, mixer in enumerate(self.mixers):
            x = mixer(-x[:, :2] if number == self.cut else x, condition)
        for mixer in list(self.mixers)[: self.twice]:
            x = mixer(x, condition)
        return x


BATCH = {0: Dim("batch", min=1, max=8)}


def regions(module: nn.Module, pipeline: str = "canonicalize") -> list[tuple[Region, ...]]:
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, 8), torch.randn(2, 8)
    program, _ = rewritten(captured(module, *inputs, dynamic=BATCH), pipeline)
    return repeated_regions(program)


def modules(groups: list[tuple[Region, ...]]) -> list[list[str]]:
    return [[region.module for region in group] for group in groups]


def test_equal_blocks_are_found_whatever_their_weights() -> None:
    [group] = regions(Stack(Mixer(), Mixer(), Mixer()))
    assert [region.module for region in group] == ["mixers.0", "mixers.1", "mixers.2"]
    assert [len(region.weights) for region in group] == [6, 6, 6]
    for counterparts in zip(*(region.nodes for region in group), strict=True):
        assert len({node.target for node in counterparts}) == 1


def test_what_the_first_computes_for_all_stays_outside() -> None:
    [group] = regions(Stack(Mixer(), Mixer()))
    shared = {node.name for node in group[0].inputs} & {node.name for node in group[1].inputs}
    assert len(shared) == 1
    assert all(node.target is not torch.ops.aten.silu.default for r in group for node in r.nodes)


@pytest.mark.parametrize(
    "other",
    [
        lambda: Mixer(eps=1e-6),
        lambda: Mixer(24),
        lambda: Mixer(write=True),
    ],
    ids=["epsilon", "weight shape", "write"],
)
def test_what_differs_is_on_its_own(other: Callable[[], nn.Module]) -> None:
    class Pair(Stack):
        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            for mixer in self.mixers:
                x = mixer(x, condition) if isinstance(mixer, Mixer) else mixer(x)
            return x

    assert modules(regions(Pair(Mixer(), other()))) == []
    assert modules(regions(Pair(Mixer(), other(), Mixer()))) == [["mixers.0", "mixers.2"]]
