"""The training loops of the documentation, with the encoder and with its cache: the same losses."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_fixtures import short_captions
from exports import Exports, cast
from torch import Tensor, nn
from transformers import AutoTokenizer, T5EncoderModel

from enginecast.cache import CachedEncoder, require_frozen
from enginecast.errors import CacheMissError

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "embedding-cache.md"


def block(name: str) -> str:
    """The loop of the documentation: "cached", or "live", as it was before two lines changed."""
    page = PAGE.read_text(encoding="utf-8")
    [cached] = re.findall(r"```python\n# runs: cached\n(.*?)```", page, flags=re.DOTALL)
    if name == "cached":
        return str(cached)
    live, replaced = re.subn(r"CachedEncoder\(cache\)  # was: ", "", cached)
    live, dropped = re.subn(r"require_frozen\(.*  # new\n", "", live)
    assert (replaced, dropped) == (1, 1)
    return live


class Pooled(nn.Module):
    """The mean of a text's rows, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 3)

    def forward(self, embeds: Tensor, mask: Tensor) -> Tensor:
        kept = mask[..., None].to(embeds.dtype)
        found: Tensor = self.head((embeds * kept).sum(1) / kept.sum(1))
        return found


def run(name: str, folder: str, texts: list[str], **more: Any) -> list[float]:
    torch.manual_seed(11)
    batches = [(texts[at : at + 4], torch.randn(4, 3)) for at in range(0, 24, 4)]
    losses: list[float] = []
    names = {"torch": torch, "AutoTokenizer": AutoTokenizer, "folder": folder, "losses": losses}
    exec(block(name), {**names, "model": Pooled(), "batches": batches, **more})
    return losses


def test_the_loop_with_a_cache_learns_the_same(
    exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, texts = exports.model("words-t5"), short_captions(24, seed=9)
    (tmp_path / "captions.txt").write_text("\n".join(texts) + "\n")
    cache = tmp_path / "cache"
    done = cast(
        capsys,
        "cache",
        "fill",
        folder,
        "--prompts",
        tmp_path / "captions.txt",
        "-o",
        cache,
        "--quiet",
    )
    assert done.code == 0, done.err
    live = run("live", folder, texts, T5EncoderModel=T5EncoderModel)
    own = {"CachedEncoder": CachedEncoder, "require_frozen": require_frozen, "cache": cache}
    cached = run("cached", folder, texts, **own)
    assert live[0] != pytest.approx(live[-1], rel=0.1)
    assert cached == pytest.approx(live, rel=1e-4)
    shuffled = run("cached", folder, texts[::-1], **own)
    assert shuffled != pytest.approx(live, rel=1e-2)  # other texts, other losses
    with pytest.raises(CacheMissError, match="it was not filled"):
        run("cached", folder, ["robot robot robot robot", *texts[1:]], **own)
