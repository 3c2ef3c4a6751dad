"""The key of an entry: a hash of the spec's fingerprint and the token ids.

Token ids, and not the text: they are all that a drop-in for the encoder is given, equal texts share
an entry, and whatever changes the ids (tokenizer, template, truncation) changes the key by itself.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from enginecast.cache.spec import EncoderSpec, fingerprint
from enginecast.runtime.arrays import Array

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
        row = self.pad(ids) if self.spec.padded else ids
        base.update(np.asarray(row, dtype="<i8").tobytes())
        if self.spec.padded and self.spec.mask:
            base.update(len(ids).to_bytes(8, "little"))
        return base.digest()

    def pad(self, ids: Sequence[int] | Array) -> Array:
        """Ids filled up to `max_length`: int64 [max_length]."""
        row = np.full(self.spec.max_length, self.spec.padding_id, dtype=np.int64)
        if self.spec.padding_side == "right":
            row[: len(ids)] = ids
        else:
            row[len(row) - len(ids) :] = ids
        return row
