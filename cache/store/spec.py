"""What decides the outputs of a text encoder, written down and hashed.

Trainers key their caches on the caption or on the file's name, and serve stale embeddings when the
encoder, its precision, the tokenizer or the length changes (tdrussell/diffusion-pipe#497,
kijai/ComfyUI-WanVideoWrapper#2046).  Here each of these is a field, and the fingerprint of all of
them goes into every key, with the token ids.  Token ids, and not the text: they are all that a
drop-in for the encoder is given, equal texts share an entry, and whatever changes the ids
(tokenizer, template, truncation) changes the key by itself.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from enginecast.runtime.bundle.manifest import Clean as Clean
from enginecast.runtime.bundle.manifest import DType, Record
from enginecast.runtime.values.arrays import Array

Rows = Literal["real", "all"]
Side = Literal["right", "left"]
Size = Annotated[int, Meta(ge=0)]
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]+\Z")]


class OutputSpec(Record, frozen=True, kw_only=True):
    """One output of the encoder, as it is stored."""

    name: str
    """As engines name it: "last_hidden_state", "pooler_output", "hidden_states.-2"."""
    per: Literal["token", "text"]
    """A row for each token, or one for the text."""
    width: Annotated[int, Meta(ge=1)]
    dtype: DType


class EncoderSpec(Record, frozen=True, kw_only=True):
    """Everything that an entry depends on besides its token ids."""

    model: dict[str, str]
    """Digest of each part of the model: "config", "weights"."""
    engine: dict[str, str] = msgspec.field(default_factory=dict)
    """Of an engine its target, pipeline and the digests of its files; empty: eager."""
    precision: str
    """What the encoder computes in: "fp32", "bf16", "int8"."""
    tokenizer: Hex
    """Digest of the tokenizer; see `tokenizing.digest_of`."""
    template: str = "{}"
    """What a text is put into before it is tokenized, in place of the braces."""
    clean: Clean = "none"
    """What is done to a text before that."""
    special_tokens: bool = True
    """Whether the tokenizer adds its own tokens, such as one for the end."""
    keep_end: bool = False
    """Whether what the template has behind the text is tokenized by itself, and never cut."""
    max_length: Annotated[int, Meta(ge=1)]
    """Longest text in tokens; also what rows are padded to where they are all kept."""
    padding_id: Size
    padding_side: Side = "right"
    mask: bool
    """Whether the encoder gets a padding mask.  If not, padding changes every row."""
    rows: Rows
    """Rows kept of each text: those of its tokens, or all `max_length`."""
    extra_rows: Size = 0
    """Rows of padding kept behind those of the tokens (Chroma reads one)."""
    skip_rows: Size = 0
    """Rows dropped at the front: those of a template that the model does not read."""
    outputs: Annotated[tuple[OutputSpec, ...], Meta(min_length=1)]

    @property
    def padded(self) -> bool:
        """Whether what is stored depends on the length that the text was padded to."""
        return not self.mask or self.rows == "all" or self.extra_rows > 0

    def span(self, tokens: int) -> tuple[int, int]:
        """The rows kept of a text of so many tokens, padding left out: begin and end within
        `max_length` ids where `padded`, else within `tokens`.
        """
        if self.rows == "all":
            return self.skip_rows, self.max_length
        if self.padded and self.padding_side == "left":
            return self.max_length - tokens + self.skip_rows, self.max_length
        end = tokens + self.extra_rows
        return self.skip_rows, min(end, self.max_length)

    def bytes_for(self, tokens: int) -> int:
        """Size of what is stored of a text's outputs."""
        begin, end = self.span(tokens)
        return sum(
            max(0, end - begin if output.per == "token" else 1)
            * output.width
            * np.dtype(output.dtype).itemsize
            for output in self.outputs
        )


class About(Record, frozen=True, kw_only=True):
    """What is good to know of an encoder, and does not change what it gives."""

    encoder: str
    """Class of the model, such as "T5EncoderModel"; what it returns follows from it."""
    source: str
    """Where the entries come from: the name of the bundle or of the model's folder."""
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    """The model's config.json; empty where nobody had it."""
    verdict: str = ""
    """Of the engine: "verified", "verified-by-emulation"; empty: eager."""


_canonical = partial(msgspec.json.encode, order="deterministic")
_LATER = {"special_tokens": True, "keep_end": False}
"""Fields that caches of older versions do not have: what they say by default changes no key."""


def fingerprint(spec: EncoderSpec) -> str:
    """Hash a spec: 32 hexadecimal digits, equal for equal specs on every machine."""
    said = msgspec.structs.asdict(spec).items()
    kept = {name: value for name, value in said if _LATER.get(name) is not value}
    parts = (b'"%s":%s' % (name.encode(), _canonical(value)) for name, value in kept.items())
    canonical = b"{%s}" % b",".join(parts)
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def differences(ours: EncoderSpec, theirs: EncoderSpec) -> list[str]:
    """The fields in which two specs differ, each as "field: OURS, THEIRS"."""
    found = []
    for field in EncoderSpec.__struct_fields__:
        pair = getattr(ours, field), getattr(theirs, field)
        if pair[0] != pair[1]:
            plain = (
                repr(v) if isinstance(v, str) else msgspec.json.encode(v).decode() for v in pair
            )
            found.append(f"{field}: {', '.join(plain)}")
    return found


def pad_rows(
    spec: EncoderSpec, rows: Sequence[Sequence[int] | Array], length: int
) -> tuple[Array, Array]:
    """Ids of texts, padded on the spec's side, and a mask, 1 for tokens: int64 [texts, length]."""
    ids = np.full((len(rows), length), spec.padding_id, np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        begin = length - len(row) if spec.padding_side == "left" else 0
        ids[number, begin : begin + len(row)] = row
        mask[number, begin : begin + len(row)] = 1
    return ids, mask


KEY_BYTES = 16


class Keys:
    """Makes the keys of one spec."""

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec
        self._base = hashlib.blake2b(bytes.fromhex(fingerprint(spec)), digest_size=KEY_BYTES)

    def of_tokens(self, ids: Sequence[int] | Array) -> bytes:
        """The key of a text, given its ids without padding.

        Where padding decides the outputs, the padded row is hashed, and with a mask how much of it
        is text: a text may end in what the tokenizer pads with (CLIP's end token).
        """
        base = self._base.copy()
        row = pad_rows(self.spec, [ids], self.spec.max_length)[0] if self.spec.padded else ids
        base.update(np.asarray(row, dtype="<i8").tobytes())
        if self.spec.padded and self.spec.mask:
            base.update(len(ids).to_bytes(8, "little"))
        return base.digest()
