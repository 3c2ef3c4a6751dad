"""The drop-in gives what the encoder gives, and refuses what it cannot."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import TEXTS, batch_of, fill, spec_of, tiny
from diffusers import CogVideoXPipeline
from torch import Tensor
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedModel,
    T5EncoderModel,
)
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from enginecast.cache.read.cached_encoder import CachedEncoder
from enginecast.errors import UsageError

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


@pytest.fixture
def t5(tmp_path: Path) -> CachedEncoder:
    model = tiny(T5EncoderModel)
    fill(tmp_path / "cache", model, spec_of(model, ("last_hidden_state",)))
    return CachedEncoder(tmp_path / "cache")


@pytest.fixture
def clip(tmp_path: Path) -> CachedEncoder:
    model = tiny(CLIPTextModelWithProjection)
    outputs = ("text_embeds", "hidden_states.-2")
    spec = spec_of(model, outputs, mask=False, rows="all")
    fill(tmp_path / "clip", model, spec)
    return CachedEncoder(tmp_path / "clip")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda one: one.requires_grad_(True), "nothing in it can be trained"),
        (lambda one: one.get_input_embeddings(), "whose weights are not loaded"),
        (lambda one: one.resize_token_embeddings(99), "whose weights are not loaded"),
        (lambda one: one.add_adapter(None, adapter_name="x"), "whose weights are not loaded"),
        (lambda one: one.save_pretrained("x"), "it has no weights"),
        (lambda one: one(inputs_embeds=torch.ones(1, 2, 3)), "inputs_embeds: a cache is asked by"),
        (lambda one: one(**asked(one), output_attentions=True), "holds no attention weights"),
        (lambda one: one(**asked(one), position_ids=torch.ones(1, 12)), "position_ids: expected"),
        (lambda one: one(), "input_ids: expected int64"),
        (lambda one: one(torch.ones(2, 3)), "input_ids: expected int64"),
        (lambda one: one([[1, 2]]), "input_ids: expected a tensor .* got a list"),
        (lambda one: one(torch.ones(1, 2).long(), [[1, 1]]), "attention_mask: expected a tensor"),
        (lambda one: one(**asked(one), position_ids=[0]), "position_ids: expected a tensor"),
        (lambda one: one(torch.ones(1, 2).long(), torch.full((1, 2), 0.5)), "zeros and ones"),
    ],
)
def test_what_no_cache_can_do_is_refused(t5: CachedEncoder, call: Any, said: str) -> None:
    with pytest.raises((UsageError, AttributeError), match=said):
        call(t5)


def test_it_is_a_component_of_a_pipeline(t5: CachedEncoder) -> None:
    pipeline = CogVideoXPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=None, scheduler=None
    )
    pipeline.register_modules(text_encoder=t5)
    assert pipeline.components["text_encoder"] is t5
    assert pipeline.to(torch.bfloat16).dtype == torch.bfloat16
    assert t5.dtype == torch.bfloat16
