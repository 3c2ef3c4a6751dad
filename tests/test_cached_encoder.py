"""The drop-in gives what the encoder gives, and refuses what it cannot."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import TEXTS, batch_of, fill, spec_of, tiny
from torch import Tensor
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedModel,
    T5EncoderModel,
)
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from enginecast.cache.cached_encoder import CachedEncoder

CASES: dict[str, tuple[type[PreTrainedModel], tuple[str, ...], dict[str, Any]]] = {
    "t5": (T5EncoderModel, ("last_hidden_state",), {}),
    "t5-left": (T5EncoderModel, ("last_hidden_state",), {"padding_side": "left"}),
    "t5-all": (T5EncoderModel, ("last_hidden_state",), {"rows": "all"}),
    "t5-no-mask": (T5EncoderModel, ("last_hidden_state",), {"mask": False, "rows": "all"}),
    "t5-no-mask-real": (T5EncoderModel, ("last_hidden_state",), {"mask": False}),
    "t5-extra": (T5EncoderModel, ("last_hidden_state",), {"extra_rows": 1}),
    "t5-skip": (T5EncoderModel, ("last_hidden_state",), {"skip_rows": 1}),
    "clip": (
        CLIPTextModel,
        ("last_hidden_state", "pooler_output", "hidden_states.-2"),
        {"mask": False, "rows": "all"},
    ),
    "clip-projection": (
        CLIPTextModelWithProjection,
        ("text_embeds", "hidden_states.-2"),
        {"mask": False, "rows": "all"},
    ),
}
DECLARED: dict[type, type] = {  # T5 returns another class than it says, of the same fields
    T5EncoderModel: BaseModelOutput,
    CLIPTextModel: BaseModelOutputWithPooling,
    CLIPTextModelWithProjection: CLIPTextModelOutput,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, CachedEncoder]:
    kind, outputs, fields = CASES[request.param]
    model = tiny(kind)
    cache = fill(tmp_path / "cache", model, spec_of(model, outputs, **fields))
    return model, CachedEncoder(cache.folder.parent)


def asked(cached: CachedEncoder) -> dict[str, Tensor]:
    """A batch of the cached texts, as the spec has the encoder asked."""
    spec = cached.spec
    batch = batch_of(TEXTS, spec.max_length, side=spec.padding_side)
    masked = {"attention_mask": batch.mask} if spec.mask else {}
    return {"input_ids": batch.ids, **masked}


def pick(output: Any, name: str) -> Tensor:
    """An output by the name that a spec has for it."""
    field, _, index = name.partition(".")
    found = output[field][int(index)] if index else output[field]
    assert isinstance(found, Tensor)
    return found


@torch.no_grad()
def test_cached_equals_live(case: tuple[PreTrainedModel, CachedEncoder]) -> None:
    model, cached = case
    batch, spec = asked(cached), cached.spec
    live = model(**batch, output_hidden_states=True)
    exact = copy.deepcopy(model).double()(**batch, output_hidden_states=True)
    found = cached(**batch, output_hidden_states=True)
    assert type(found) is DECLARED[type(model)]
    counts = batch_of(TEXTS, spec.max_length).mask.sum(1).tolist()
    for one in spec.outputs:
        wanted, got = pick(live, one.name), pick(found, one.name)
        # A text alone takes other kernels than in a batch: both round, as far as fp64 tells.
        rounding = 4 * (wanted - pick(exact, one.name)).abs().max().item()
        assert rounding < 1e-4 * wanted.abs().max()
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        for text, count in enumerate(counts):
            begin, end = stored(cached, count) if one.per == "token" else (0, wanted.shape[1])
            torch.testing.assert_close(
                got[text][begin:end], wanted[text][begin:end], rtol=0, atol=rounding
            )
            assert one.per == "text" or not got[text, :begin].any()
            assert one.per == "text" or not got[text, end:].any()


def stored(cached: CachedEncoder, count: int) -> tuple[int, int]:
    """The rows of a text of `count` tokens that are stored, within `max_length`."""
    spec = cached.spec
    if spec.padded or spec.padding_side == "right":
        return spec.span(count)
    return spec.max_length - count + spec.skip_rows, spec.max_length
