"""Texts to token ids, with the `tokenizers` library alone: transformers would import torch."""

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from enginecast.cache.store.spec import EncoderSpec
from enginecast.errors import CacheError, UsageError
from enginecast.runtime.prompts import refusing
from enginecast.runtime.text_form import prepare_text
from enginecast.runtime.values.arrays import Array

_BLOCK = 1024
"""Texts tokenized at a time: encodings take some hundred bytes a token."""


class Tokens(NamedTuple):
    """A text as the encoder reads it."""

    ids: Array
    """int32 [tokens], cut to the longest, without padding."""
    length: int
    """Tokens before it was cut."""


class Tokenizing:
    """Makes token ids of texts, as a spec says.

    Args:
        tokenizer: text of a `tokenizer.json`; what it says of padding is not used, nor how many
            tokens it truncates at, but from which side it does is.
        spec: has the cleaning, the template and the longest text.

    Raises:
        CacheError: not a tokenizer, or another one than the spec's.
        UsageError: the spec's template has not one pair of braces, or its longest text does not
            hold the tokens that the tokenizer adds.
    """

    def __init__(self, tokenizer: bytes, spec: EncoderSpec) -> None:
        if (count := spec.template.count("{}")) != 1:
            raise UsageError(
                f"--template {spec.template!r}: expected one {{}}, got {count}",
                hint="The text goes in place of the braces: 'a photo of {}'.",
            )
        found = digest_of(tokenizer)
        if found != spec.tokenizer:
            raise CacheError(
                f"tokenizer.json: expected the tokenizer {spec.tokenizer}, got {found}",
                hint="Put the original back, or fill a new cache.",
            )
        self.spec = spec
        self._tokenizer = parse_tokenizer(tokenizer)
        side = (self._tokenizer.truncation or {}).get("direction", "right")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.num_special_tokens_to_add(False) if spec.special_tokens else 0
        self._added, self._end = added, np.zeros(0, np.int32)
        what = "the tokenizer adds to each text"
        if spec.keep_end:
            end = self._encode([prepare_text(spec, "")[1]])[0]
            self._end, what = (
                np.array(end.ids, np.int32),
                f"{what}, and those of the template's end",
            )
        room = spec.max_length - len(self._end)
        if room <= added:
            raise UsageError(
                f"--max-length {spec.max_length}: expected more than the "
                f"{added + len(self._end)} tokens that {what}"
            )
        self._tokenizer.enable_truncation(room, direction=side)

    def _encode(self, texts: Sequence[str]) -> list[Encoding]:
        with refusing("tokenizer.json: cannot tokenize", CacheError):
            return self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=self.spec.special_tokens
            )

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Clean texts, put them into the template, tokenize and cut them."""
        made: list[Tokens] = []
        for start in range(0, len(texts), _BLOCK):
            block = [prepare_text(self.spec, text)[0] for text in texts[start : start + _BLOCK]]
            for encoding in self._encode(block):
                # What was cut off lies in further encodings, each with the tokens that all get.
                cut_off = sum(len(part) - self._added for part in encoding.overflowing)
                ids = np.concatenate([np.array(encoding.ids, np.int32), self._end])
                made.append(Tokens(ids, len(ids) + cut_off))
        return made


def digest_of(tokenizer: bytes) -> str:
    """Hash a `tokenizer.json`: 32 hexadecimal digits; a CacheError where it is no JSON object.

    Padding and truncation do not count, but for the side that is cut off: fast tokenizers write
    there whatever they were last called with.  Neither do white space, and the order of keys in
    objects; that of lists does.  Scores count with six digits: the library reads them off by a last
    digit, and writes that.
    """
    try:
        content = json.loads(tokenizer, parse_float=lambda score: f"{float(score):.6g}")
    except ValueError as error:
        raise CacheError(f"tokenizer.json: not a tokenizer: {error}") from error
    if not isinstance(content, dict):
        raise CacheError("tokenizer.json: not a tokenizer: expected a JSON object")
    cut = content.pop("truncation", None) or {}
    content["padding"] = None
    content["truncation"] = "left" if str(cut.get("direction")).lower() == "left" else None
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def parse_tokenizer(tokenizer: bytes) -> Tokenizer:
    """Make a tokenizer from the text of a `tokenizer.json`; a CacheError where it is none."""
    with refusing("tokenizer.json: not a tokenizer", CacheError):
        return Tokenizer.from_str(tokenizer.decode())
