"""What a model is asked, as a cache is: a row of ids and its mask become the ids of a text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginecast.cache.spec import EncoderSpec
from enginecast.errors import CacheError, UsageError
from enginecast.runtime.arrays import Array


@dataclass(frozen=True)
class Asked:
    """A text that a cache is asked for.

    Args:
        tokens: int64 [tokens], those that the encoder attends to; see `asked_of`.
        sequence: length of the row they came in; None: they came bare, and are padded as needed.
        masked: whether a mask came with them.
        text: where it is known.
    """

    tokens: Array
    sequence: int | None = None
    masked: bool = False
    text: str | None = None


def require_texts(texts: Iterable[Any], name: str = "texts") -> list[str]:
    """Texts as a list; numbers are not taken for those of entries, nor None for a text.

    Raises:
        UsageError: one is no text; says which.
    """
    if isinstance(texts, str):
        raise UsageError(f"{name}: expected a list of texts, got one: {texts!r}")
    made = []
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UsageError(f"{name}: expected a text at {number}, got {text!r:.80}")
        made.append(str(text))
    return made


def token_ids(ids: Sequence[int] | Array, *, name: str = "input_ids") -> Array:
    """Ids as int64 [tokens].

    Raises:
        CacheError: they are no whole numbers, or not in one row.
    """
    found = np.asarray(ids)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise CacheError(
            f"{name}: expected one row of whole numbers, got {found.dtype} {list(found.shape)}"
        )
    return found.astype(np.int64)


def asked_of(spec: EncoderSpec, row: Array, mask: Array | None) -> Asked:
    """What a row as the model gets it asks for: the ids that the encoder attends to.

    An encoder that takes a mask and is given none attends to the whole row, so then all its ids are
    tokens; that is right for a text that fills its row, and a miss for one with padding.

    Args:
        row: int64 [sequence]
        mask: [sequence], not zero for tokens; None: none was given.

    Returns:
        The ids without padding; where the spec has no mask, the row as it is.

    Raises:
        CacheError: the mask has holes, pads the other side, or has no place in the spec.
    """
    if mask is None:
        return Asked(row, len(row))
    if mask.shape != row.shape:
        raise CacheError(
            f"attention_mask: expected one value for each of {len(row)} ids, got {list(mask.shape)}"
        )
    kept = np.flatnonzero(mask)
    if len(kept) == len(row):
        return Asked(row, len(row), masked=True)
    if not spec.mask:
        raise CacheError(
            f"attention_mask: {len(row) - len(kept)} of {len(row)} ids are masked, but these "
            "outputs were computed without a mask, and padding changed them",
            hint="Give no mask, as the fill did, or fill a cache with --mask.",
        )
    if len(kept) and kept[-1] - kept[0] + 1 != len(kept):
        raise CacheError("attention_mask: expected the tokens in one piece, but it has holes")
    begins = len(row) - len(kept) if spec.padding_side == "left" else 0
    if len(kept) and kept[0] != begins:
        raise CacheError(
            f"attention_mask: expected padding on the {spec.padding_side}, as in the cache's spec, "
            f"but the tokens are at {kept[0]} to {kept[-1]} of {len(row)}",
            hint=f"Set the tokenizer's padding_side to {spec.padding_side!r}.",
        )
    return Asked(row[kept], len(row), masked=True)


def first_row(spec: EncoderSpec, tokens: int, sequence: int) -> int:
    """Where the stored rows of a text begin within a row of ids.

    Args:
        tokens: of the text.
        sequence: length of the row: `max_length` where the spec is `padded` and pads on the left.
    """
    if spec.rows == "all" or spec.padding_side == "right":
        return spec.skip_rows
    return sequence - tokens + spec.skip_rows
