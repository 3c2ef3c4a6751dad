"""Entries of caches that no encoder made: random outputs of texts with a real tokenizer's ids."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from enginecast.cache.encoders.tokenizing import digest_of
from enginecast.cache.store.folders import Encodings, create_store
from enginecast.cache.store.shard import Entry, open_shard
from enginecast.cache.store.spec import About, EncoderSpec, Keys, OutputSpec

WORDS = [f"w{number}" for number in range(90)]
HIDDEN = OutputSpec(name="last_hidden_state", per="token", width=5, dtype="bfloat16")
POOLED = OutputSpec(name="pooler_output", per="text", width=3, dtype="float32")


def _tokenizer() -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return made


TOKENIZER = _tokenizer()
TOKENIZER_JSON = TOKENIZER.to_str().encode()
SPEC = EncoderSpec(
    model={"weights": "a"},
    precision="fp32",
    tokenizer=digest_of(TOKENIZER_JSON),
    max_length=8,
    padding_id=0,
    mask=True,
    rows="real",
    outputs=(HIDDEN, POOLED),
)
ABOUT = About(encoder="T5EncoderModel", source="tiny-t5")


def spec_with(**fields: Any) -> EncoderSpec:
    return msgspec.structs.replace(SPEC, **fields)


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of up to 7 words, no two alike; the first is empty."""
    chooser, made = random.Random(seed), {"": None}
    while len(made) < count:
        made[" ".join(chooser.choices(WORDS, k=len(made) % 7 + 1))] = None
    return list(made)


def entries(
    of: Sequence[str], spec: EncoderSpec = SPEC, *, seed: int = 0, noise: float = 0.0
) -> list[Entry]:
    """Entries of texts; equal texts have equal outputs, but for `noise` of relative size."""
    keys = Keys(spec)
    made = []
    for text in of:
        ids = np.array(TOKENIZER.encode(text).ids[: spec.max_length], np.int32)
        begin, end = spec.span(len(ids))
        source = np.random.default_rng([seed, *ids.tolist()])
        other = np.random.default_rng([seed + 1, *ids.tolist()])
        outputs = {}
        for one in spec.outputs:
            shape = (end - begin, one.width) if one.per == "token" else (one.width,)
            values = source.normal(size=shape)
            values += noise * other.normal(size=shape)
            dtype = ml_dtypes.bfloat16 if one.dtype == "bfloat16" else one.dtype
            outputs[one.name] = values.astype(dtype)
        made.append(Entry(keys.of_tokens(ids), text, ids, outputs))
    return made


def fill(
    root: Path,
    *shards: Sequence[Entry],
    name: str = "text_encoder",
    spec: EncoderSpec = SPEC,
    about: About = ABOUT,
) -> Encodings:
    """Commit entries to a cache, which is made where there is none."""
    encodings = create_store(root).add(name, spec, about, TOKENIZER_JSON)
    for one in shards:
        encodings.commit(one)
    return encodings


def flip(path: Path, byte: int) -> None:
    """Flip the lowest bit of a byte, in place."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def held(encodings: Encodings) -> list[str]:
    """The texts whose entries are there, whole; each once."""
    found = []
    for path in encodings.shard_paths():
        shard = open_shard(path, encodings.spec)
        found += [shard.text(text) for text in range(len(shard)) if shard.is_whole(text)]
    assert len(found) == len(set(found))
    return sorted(found)


def byte_of(path: Path, name: str) -> int:
    """A byte of the file that belongs to a tensor: its first."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return 8 + size + int(json.loads(data[8 : 8 + size])[name]["data_offsets"][0])
