"""Texts to batches, batches to entries: padding, the rows kept, and which of them are finite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from enginecast.cache.encoder import Encoder
from enginecast.cache.shard_writing import Entry
from enginecast.cache.spec import EncoderSpec, OutputSpec
from enginecast.cache.work import Failure, Wanted
from enginecast.errors import InputError
from enginecast.runtime.arrays import Array


@dataclass(frozen=True)
class Encoded:
    """What became of a batch."""

    entries: tuple[Entry, ...]
    failures: tuple[Failure, ...]


def batches(
    wanted: Sequence[Wanted], spec: EncoderSpec, batch_tokens: int
) -> Iterator[Sequence[Wanted]]:
    """Cut texts into batches.

    Args:
        wanted: in the order of their lengths, longest first, so that little is padding.
        batch_tokens: the most tokens in a batch, padding included; one text is always taken.
    """
    begin = 0
    while begin < len(wanted):
        length = _padded_length(wanted[begin : begin + 1], spec)
        end = begin + max(1, batch_tokens // length)
        yield wanted[begin:end]
        begin = end


def encode_batch(encoder: Encoder, batch: Sequence[Wanted]) -> Encoded:
    """Encode texts and look at every row that is kept.

    A text whose outputs are not finite, or that the encoder refuses when it is alone, is a failure;
    the others of its batch are not touched by that.

    Raises:
        InputError: the encoder refuses each of several texts: it is not the texts' fault.
    """
    try:
        return _encode(encoder, batch)
    except InputError as error:
        if len(batch) == 1:
            return Encoded((), (_refused(batch[0], error),))
        parts = [_encode_alone(encoder, one) for one in batch]
        if not any(part.entries for part in parts):
            raise
    entries = tuple(entry for part in parts for entry in part.entries)
    return Encoded(entries, tuple(failure for part in parts for failure in part.failures))


def _encode_alone(encoder: Encoder, wanted: Wanted) -> Encoded:
    try:
        return _encode(encoder, [wanted])
    except InputError as error:
        return Encoded((), (_refused(wanted, error),))


def _encode(encoder: Encoder, batch: Sequence[Wanted]) -> Encoded:
    spec = encoder.spec
    ids, mask = pad_batch(batch, spec)
    outputs = encoder.encode(ids, mask)
    entries, failures = [], []
    for row, wanted in enumerate(batch):
        kept = _kept(spec, outputs, row, len(wanted.ids), ids.shape[1])
        reason = _not_finite(kept)
        if reason:
            failures.append(Failure(wanted.text, len(wanted.ids), reason, wanted.key))
        else:
            entries.append(Entry(wanted.key, wanted.text, wanted.ids, kept))
    return Encoded(tuple(entries), tuple(failures))


def pad_batch(batch: Sequence[Wanted], spec: EncoderSpec) -> tuple[Array, Array]:
    """Ids and mask of a batch: int64 [texts, length], the length that the spec says or the longest.

    The mask is 1 for tokens; all ones where the encoder is not told what is padding.
    """
    length = _padded_length(batch, spec)
    ids = np.full((len(batch), length), spec.padding_id, np.int64)
    mask = np.zeros((len(batch), length), np.int64)
    for row, wanted in enumerate(batch):
        begin = length - len(wanted.ids) if spec.padding_side == "left" else 0
        ids[row, begin : begin + len(wanted.ids)] = wanted.ids
        mask[row, begin : begin + len(wanted.ids)] = 1
    return ids, mask if spec.mask else np.ones_like(mask)


def _padded_length(batch: Sequence[Wanted], spec: EncoderSpec) -> int:
    if spec.padded:
        return spec.max_length
    return max(1, *(len(wanted.ids) for wanted in batch))


def _kept(
    spec: EncoderSpec, outputs: dict[str, Array], row: int, tokens: int, length: int
) -> dict[str, Array]:
    """The outputs of one text, cloned: a view would keep the whole batch in memory."""
    begin, end = spec.span(tokens)
    shift = length - tokens if spec.padding_side == "left" and not spec.padded else 0
    rows = slice(begin + shift, max(begin, end) + shift)
    return {one.name: _row(one, outputs[one.name][row], rows) for one in spec.outputs}


def _row(output: OutputSpec, values: Array, rows: slice) -> Array:
    kept: Array = (values[rows] if output.per == "token" else values).copy()
    return kept


def _not_finite(outputs: dict[str, Array]) -> str:
    """What is wrong with the outputs of a text; empty: nothing."""
    for name, values in outputs.items():
        finite = np.isfinite(values)
        if not finite.all():
            count = values.size - int(finite.sum())
            return f"{name}: {count} of {values.size} values are not finite in {values.dtype}"
    return ""


def _refused(wanted: Wanted, error: InputError) -> Failure:
    reason = f"refused by the encoder: {error.message}"
    return Failure(wanted.text, len(wanted.ids), reason, wanted.key)
