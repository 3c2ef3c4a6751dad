"""Flex attention is captured as its definition, and the caller's own keeps working."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from enginecast.api import compile as export
from enginecast.capture.tracing.patches.table import flex_attention_spelled_out
from enginecast.runtime.load import load

pytestmark = pytest.mark.filterwarnings("ignore")


class Windowed(nn.Module):
    """A score_mod that reads a weight and places, and a block mask of the call's own sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )

        def mod(score: Tensor, row: Tensor, head: Tensor, at: Tensor, to: Tensor) -> Tensor:
            return score - self.slope[head] * (at - to) * 0.1

        def seen(row: Tensor, head: Tensor, at: Tensor, to: Tensor) -> Tensor:
            return (at >= to) & (to < lengths[row])

        tokens = x.shape[1]
        mask = create_block_mask(seen, x.shape[0], None, tokens, tokens, device="cpu")
        found = flex_attention(query, key, value, score_mod=mod, block_mask=mask)
        assert isinstance(found, Tensor)
        return found.transpose(1, 2).flatten(2)


class Watched(TorchDispatchMode):
    """Takes operators alone, as the modes do that follow a model's values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_it_can_be_followed() -> None:
    query, key, value = torch.randn(3, 2, 2, 6, 4).unbind()
    with flex_attention_spelled_out(), Watched():  # type: ignore[no-untyped-call]
        found = flex_attention(query, key, value)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value))


@pytest.mark.slow
def test_flex_attention_with_a_score_mod_and_a_block_mask(tmp_path: Path) -> None:
    module, x, lengths = Windowed(), torch.randn(2, 6, 8), torch.tensor([3, 6])
    export(module, tmp_path / "bundle", example={"x": x, "lengths": lengths})
    with torch.no_grad():
        wanted = module(x, lengths)
    with load(tmp_path / "bundle") as engine:
        found = engine.run({"x": x.numpy(), "lengths": lengths.numpy()})["output_0"]
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-5, atol=1e-6)
