"""How far the entries of two caches are from one another, text by text.

The use is one encoder in two precisions: fp32 and bf16, or an int8 engine.  The first cache is the
reference.  Texts are joined by their token ids where both have the same tokenizer, else as texts.
"""

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.spec import OutputSpec, differences
from enginecast.errors import CacheError
from enginecast.runtime.values.arrays import Array

_LAYOUT = ("rows", "extra_rows", "skip_rows")
"""Fields that decide which rows are kept."""
Watch = Callable[[int], object]
"""Called with how many texts were compared since the last call."""


@dataclass(frozen=True)
class OutputError:
    """Of one output, over all texts.

    Args:
        rows: that were compared: tokens, or texts; the cosines are theirs.
        relative_median: of a text: L2 of the difference, divided by that of the reference.
        largest: difference of two values.
    """

    name: str
    rows: int
    cosine_least: float
    cosine_p1: float
    cosine_median: float
    relative_median: float
    relative_largest: float
    largest: float


@dataclass(frozen=True, order=True)
class TextError:
    """The output of a text that is furthest off.

    Args:
        relative: L2 of the difference, divided by that of the reference.
        cosine: least of a row.
        token: number of that row's token, padding in front counted; None: an output per text.
        largest: difference of two values.
    """

    relative: float
    text: str
    output: str
    cosine: float
    token: int | None
    largest: float


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Args:
        texts: that are in both.
        differs: fields of the specs that differ: "precision: 'fp32', 'bf16'".
        worst: largest relative error first.
    """

    joined_by: Literal["ids", "text"]
    texts: int
    only_first: int
    only_second: int
    differs: tuple[str, ...]
    outputs: tuple[OutputError, ...]
    worst: tuple[TextError, ...]


def compare(
    first: Encodings, second: Encodings, *, worst: int = 10, watch: Watch | None = None
) -> Comparison:
    """Compare what both have, in float64.  Memory: some bytes a row, whatever the rows' width.

    Raises:
        CacheError: they have no text or no output in common, or keep other rows; or an entry is
            damaged.
    """
    outputs = _require_alike(first, second)
    indices = [open_index(one, keep=False).require_whole() for one in (first, second)]
    by_ids = first.spec.tokenizer == second.spec.tokenizer
    names = [_names(index, by_ids=by_ids) for index in indices]
    _, at_first, at_second = np.intersect1d(names[0], names[1], return_indices=True)
    if not len(at_first):
        raise CacheError(
            f"{first.folder} and {second.folder}: have no text in common",
            hint="Fill both from one file of texts.",
        )
    order = np.argsort(at_first)  # as they lie on disk
    gathered = {one.name: _Gathered() for one in outputs}
    found: list[TextError] = []  # a heap: the least error first
    for numbers in zip(at_first[order], at_second[order], strict=True):
        ours, theirs = (
            index.whole_entry(int(number)) for index, number in zip(indices, numbers, strict=True)
        )
        begin, errors = first.spec.span(len(ours.ids))[0], []
        for one in outputs:
            reference, values = ours.outputs[one.name], theirs.outputs[one.name]
            if reference.shape != values.shape:
                raise CacheError(
                    f"{second.folder}: {one.name} of {ours.text!r}: expected"
                    f" {list(reference.shape)} as in the first cache, got {list(values.shape)}",
                    hint="Their tokenizers cut it into other tokens.",
                )
            apart, relative, largest = gathered[one.name].add(
                reference.reshape(-1, one.width), values.reshape(-1, one.width)
            )
            row = int(np.argmax(apart)) if len(apart) else 0
            least = 1 - float(apart[row]) if len(apart) else 1.0
            token = begin + row if one.per == "token" else None
            errors.append(TextError(relative, ours.text, one.name, least, token, largest))
        heapq.heappush(found, max(errors))
        if len(found) > worst:
            heapq.heappop(found)
        if watch:
            watch(1)
    return Comparison(
        joined_by="ids" if by_ids else "text",
        texts=len(at_first),
        only_first=len(names[0]) - len(at_first),
        only_second=len(names[1]) - len(at_first),
        differs=tuple(differences(first.spec, second.spec)),
        outputs=tuple(gathered[one.name].summary(one.name) for one in outputs),
        worst=tuple(sorted(found, reverse=True)),
    )


def _require_alike(first: Encodings, second: Encodings) -> list[OutputSpec]:
    """The outputs to compare."""
    specs = first.spec, second.spec
    where = f"{first.folder} and {second.folder}"
    padding = ("max_length", "padding_side") if any(spec.padded for spec in specs) else ()
    names = (*_LAYOUT, *padding)
    layout = [one for one in differences(*specs) if one.partition(":")[0] in names]
    if layout:
        raise CacheError(
            f"{where}: keep different rows of a text, so rows cannot be compared:"
            f" {'; '.join(layout)}",
            hint="Fill one of them again with the options of the other.",
        )
    theirs = {one.name: one for one in specs[1].outputs}
    common = [one for one in specs[0].outputs if one.name in theirs]
    if not common:
        given = [", ".join(one.name for one in spec.outputs) for spec in specs]
        raise CacheError(f"{where}: have no output in common: {given[0]}; {given[1]}")
    for one in common:
        other = theirs[one.name]
        if (one.width, one.per) != (other.width, other.per):
            raise CacheError(
                f"{where}: {one.name}: expected {one.width} values per {one.per} as in the first,"
                f" got {other.width} per {other.per}",
                hint="They are of different models.",
            )
    return common


def _names(index: Index, *, by_ids: bool) -> Array:
    """What each entry is joined by: S16 [entries], in the order of their numbers."""
    digests = []
    shards, texts = index.rows(np.arange(len(index)))
    for shard, text in zip(shards.tolist(), texts.tolist(), strict=True):
        one = index.shards[shard]
        content = one.ids(text).tobytes() if by_ids else one.text(text).encode()
        digests.append(hashlib.blake2b(content, digest_size=16).digest())
    return np.frombuffer(b"".join(digests), "S16")


@dataclass
class _Gathered:
    """Of one output, what is known of the texts so far."""

    apart: list[Array] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)
    largest: float = 0.0

    def add(self, reference: Array, values: Array) -> tuple[Array, float, float]:
        """1 - cosine of each row, in which small differences keep their digits: float32; the
        relative L2 error; and the largest difference of two values.
        """
        ours, theirs = reference.astype(np.float64), values.astype(np.float64)
        difference = theirs - ours
        lengths = [np.linalg.norm(one, axis=1) for one in (ours, theirs)]
        # |a/|a| - b/|b||^2 = 2 (1 - cos): no difference of nearly equal numbers
        units = [
            one / np.where(length, length, 1)[:, None]
            for one, length in zip((ours, theirs), lengths, strict=True)
        ]
        apart = np.square(units[0] - units[1]).sum(1) / 2
        apart[(lengths[0] == 0) != (lengths[1] == 0)] = 1.0
        whole, off = float(np.linalg.norm(ours)), float(np.linalg.norm(difference))
        relative = off / whole if whole else float("inf") if off else 0.0
        largest = float(np.abs(difference).max(initial=0.0))
        self.apart.append(apart.astype(np.float32))
        self.relative.append(relative)
        self.largest = max(self.largest, largest)
        return self.apart[-1], relative, largest

    def summary(self, name: str) -> OutputError:
        apart = np.concatenate(self.apart)
        least = low = median = 1.0
        if len(apart):
            least, low, median = (1 - np.percentile(apart, [100, 99, 50]).astype(float)).tolist()
        relative = float(np.median(self.relative))
        largest = max(self.relative), self.largest
        return OutputError(name, len(apart), least, low, median, relative, *largest)
