"""Tiny real encoders, and caches that hold what they gave: filled here, without `cache fill`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import VOCABULARY, perturb, t5_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedModel,
    T5EncoderModel,
)

from enginecast.cache.store.folders import Encodings, create_store
from enginecast.cache.store.shard import Entry
from enginecast.cache.store.spec import About, EncoderSpec, Keys, OutputSpec
from enginecast.runtime.text_form import prepare_text

TEXTS = ("a b c", "", "d", "a b c d e f g h", "q w e r t y", "z z z")
WORDS = ["<pad>", "</s>", *(chr(ord("a") + index) for index in range(26)), "<unk>"]


def tokenizer_of() -> Tokenizer:
    """One letter a word: "a b" is [2, 3, 1], padding is 0."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def tiny(kind: type[PreTrainedModel]) -> PreTrainedModel:
    """A seeded T5 or CLIP with two layers, for inference."""
    config: Any = t5_config()
    if kind is not T5EncoderModel:
        config = CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=12,
            projection_dim=20,
            bos_token_id=27,
            eos_token_id=1,
            pad_token_id=0,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = kind(config).eval()
        perturb(model)
    return model


@dataclass(frozen=True)
class Batch:
    """Texts as a pipeline hands them to an encoder: int64 [texts, sequence]."""

    ids: Tensor
    mask: Tensor


def batch_of(
    texts: Sequence[str], length: int | None = None, *, side: str = "right", padding: int = 0
) -> Batch:
    """Tokenize texts and pad them to `length`, or to the longest."""
    tokenizer = tokenizer_of()
    if length is not None:
        tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, direction=side, pad_id=padding)
    encoded = tokenizer.encode_batch(list(texts))
    return Batch(
        torch.tensor([one.ids for one in encoded]),
        torch.tensor([one.attention_mask for one in encoded]),
    )


@torch.no_grad()
def given_by(model: nn.Module, batch: Batch, spec: EncoderSpec) -> dict[str, Tensor]:
    """The spec's outputs of a batch, from the model itself."""
    mask = {"attention_mask": batch.mask} if spec.mask else {}
    made = model(batch.ids, output_hidden_states=True, **mask)
    return {
        one.name: made.hidden_states[int(one.name.split(".")[1])]
        if one.name.startswith("hidden_states.")
        else made[one.name]
        for one in spec.outputs
    }


def spec_of(model: PreTrainedModel, outputs: Sequence[str], **fields: Any) -> EncoderSpec:
    """A spec whose outputs are float32 and as wide as the model gives them."""
    tokenizer = fields.pop("tokenizer", "ab")
    plain = {"max_length": 12, "padding_id": 0, "mask": True, "rows": "real", **fields}
    spec = EncoderSpec(
        model={"weights": "a"},
        precision="fp32",
        tokenizer=tokenizer,
        outputs=tuple(
            OutputSpec(name=name, per="token", width=1, dtype="float32") for name in outputs
        ),
        **plain,
    )
    made = given_by(model, batch_of(["a"]), spec)
    described = tuple(
        OutputSpec(
            name=name,
            per="token" if made[name].ndim == 3 else "text",
            width=made[name].shape[-1],
            dtype="float32",
        )
        for name in outputs
    )
    fields_now = {name: getattr(spec, name) for name in EncoderSpec.__struct_fields__}
    return EncoderSpec(**{**fields_now, "outputs": described})


def entries_of(model: nn.Module, spec: EncoderSpec, texts: Sequence[str]) -> list[Entry]:
    """What a fill would store of texts."""
    keys = Keys(spec)
    entries = []
    for text in texts:
        length = spec.max_length if spec.padded else None
        batch = batch_of(
            [prepare_text(spec, text)[0]], length, side=spec.padding_side, padding=spec.padding_id
        )
        count = int(batch.mask.sum())
        ids = batch.ids[0][batch.mask[0].bool()].numpy().astype("int32")
        begin, end = spec.span(count)
        given = given_by(model, batch, spec)
        outputs = {
            one.name: (given[one.name][0, begin:end] if one.per == "token" else given[one.name][0])
            .numpy()
            .copy()
            for one in spec.outputs
        }
        entries.append(Entry(keys.of_tokens(ids), text, ids, outputs))
    return entries


def fill(
    root: Path,
    model: PreTrainedModel,
    spec: EncoderSpec,
    texts: Sequence[str] = TEXTS,
    *,
    name: str = "text_encoder",
    shard: int = 4,
) -> Encodings:
    """Store what a model gives for texts, some texts a shard."""
    about = About(
        encoder=type(model).__name__,
        source="tiny",
        config=json.loads(model.config.to_json_string(use_diff=False)),
    )
    tokenizer = tokenizer_of().to_str().encode()
    encodings = create_store(root).add(name, spec, about, tokenizer)
    entries = entries_of(model, spec, texts)
    for start in range(0, len(entries), shard):
        encodings.commit(entries[start : start + shard])
    return encodings


MODELS = (T5EncoderModel, CLIPTextModel, CLIPTextModelWithProjection)
