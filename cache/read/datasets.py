"""A cache as a dataset of torch, and batches padded back with their mask.

    dataset = as_dataset(cache, captions)
    loader = DataLoader(dataset, 8, collate_fn=collate(cache.spec), num_workers=2)

Nothing of it needs the encoder.  Workers may be forked or spawned: each maps the files itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from enginecast.cache.read.reader import EmbeddingCache, require_texts
from enginecast.cache.store.shard import Entry
from enginecast.cache.store.spec import EncoderSpec, OutputSpec, pad_rows
from enginecast.errors import UsageError
from enginecast.installation import required
from enginecast.public import some
from enginecast.runtime.device.torch_values import as_tensor, to_host
from enginecast.runtime.values.arrays import Array

Item = dict[str, Any]
_TEXTS = ("string", "large_string", "string_view")
"""Types of Arrow that are texts, as `datasets` names them."""
ADDED = ("input_ids", "attention_mask")
"""Columns of every item besides the outputs."""


class CachedDataset(Dataset[Item]):
    """Texts and their outputs, map style.  Made by `as_dataset`."""

    def __init__(
        self, cache: EmbeddingCache, keys: Array, texts: Sequence[str] | None = None
    ) -> None:
        self.cache = cache
        self.keys = keys
        """uint8 [items, 16]"""
        self.texts = texts
        """As they were asked for; None: those of the cache."""

    def __repr__(self) -> str:
        return f"CachedDataset({len(self):,} items of {self.cache})"

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Item:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")  # ends a loop over the dataset
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> "Items":
        """A batch, as DataLoader asks for it: read in the order in which it lies in the shards."""
        entries = self.cache.get_many([self.keys[index].tobytes() for index in indices])
        if self.texts is not None:
            pairs = zip(entries, indices, strict=True)
            entries = [replace(entry, text=self.texts[index]) for entry, index in pairs]
        return Items(entries)

    def shards(self) -> Array:
        """The number of the shard that each item is in: int64 [items]."""
        shards, _ = self.cache.index.locations(self.cache.index.find_all(self.keys))
        return shards.astype(np.int64)


class Items(Sequence[Item]):
    """Items that are made when somebody asks for them: `collate` reads the entries themselves.

    A row is copied once on its way into a batch then, and not twice.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        return self._made[index]

    @cached_property
    def _made(self) -> list[Item]:
        return [item_of(entry) for entry in self.entries]


def as_dataset(cache: EmbeddingCache, texts: Sequence[str] | None = None) -> CachedDataset:
    """Make a torch dataset of texts and their outputs.

    Each item has `text`, `input_ids` int64 [tokens] without padding, `attention_mask` int64
    [tokens] of ones, and each output by name: [rows, width], or [width] if it has one row per text,
    in its stored dtype, which may be bfloat16.

    Args:
        cache: an open cache.
        texts: the texts, one per item; None: all entries of the cache, by number.

    Raises:
        UsageError: one of `texts` is not a string; says which.
        CacheMissError: a text is not in the cache.  It is raised now, not in mid-training.

    Examples:
        >>> from enginecast.cache import as_dataset, open_cache
        >>> dataset = as_dataset(open_cache("captions.cache"), ["a red fox"])
        >>> dataset[0]["last_hidden_state"].ndim
        2
    """
    if texts is None:
        keys = [cache.key_at(number) for number in range(len(cache))]
    else:
        texts = require_texts(texts)
        keys = cache.keys_of(texts)
    joined = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1 if keys else 16)
    return CachedDataset(cache, joined, texts)


def item_of(entry: Entry) -> Item:
    """An entry as tensors, which nobody else has."""
    outputs = {name: as_tensor(values) for name, values in entry.outputs.items()}
    return {
        "text": entry.text,
        "input_ids": torch.from_numpy(entry.ids.astype(np.int64)),
        "attention_mask": torch.ones(len(entry.ids), dtype=torch.int64),
        **outputs,
    }


@dataclass(frozen=True)
class Collate:
    """See `collate`."""

    spec: EncoderSpec
    length: int | None

    def __repr__(self) -> str:
        outputs = some(one.name for one in self.spec.outputs)
        return f"Collate({outputs}, to {self.length or 'the longest text'})"

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> Item:
        if isinstance(items, Items):
            return {"text": [entry.text for entry in items.entries], **self._batch(items.entries)}
        entries = []  # without keys, and texts come with the other columns
        for item in items:
            outputs = {one.name: to_host(item[one.name]) for one in self.spec.outputs}
            entries.append(Entry(b"", "", item["input_ids"].numpy(), outputs))
        made = self._batch(entries)
        own = dict.fromkeys(name for item in items for name in item if name not in made)
        return {**{name: _column([item[name] for item in items]) for name in own}, **made}

    def _batch(self, entries: Sequence[Entry]) -> Item:
        spec, rows, sequence = self.spec, [entry.ids for entry in entries], self.spec.max_length
        if spec.rows != "all":
            needed = min(max(map(len, rows), default=0) + spec.extra_rows, spec.max_length)
            sequence = self.length or needed
            if sequence < needed:
                raise UsageError(
                    f"length: expected at least the {needed} rows of the longest text, got "
                    f"{self.length}",
                    hint=f"The longest text of this cache may have {spec.max_length}.",
                )
        ids, mask = map(torch.from_numpy, pad_rows(spec, rows, sequence))
        outputs = {one.name: as_batch(spec, one, entries, sequence) for one in spec.outputs}
        return {"input_ids": ids, "attention_mask": mask, **outputs}


def _column(values: list[Any]) -> Any:
    """A column that is not the cache's, as torch makes it; a list where torch cannot."""
    try:
        return default_collate(values)
    except (TypeError, RuntimeError):  # of kinds it does not know, or of several shapes
        return values


def collate(spec: EncoderSpec, length: int | None = None) -> Collate:
    """Make a `collate_fn` for DataLoader that pads the items of a cached dataset to a batch.

    A batch has `input_ids` and `attention_mask` int64 [batch, sequence], and the outputs [batch,
    sequence, width], or [batch, width] if they have one row per text.  Padding is on the spec's
    side; rows that are not stored are zeros.  Everything else, `text` too, goes through torch's
    `default_collate`, or becomes a list if that cannot stack it.

    Args:
        spec: the cache's spec.
        length: tokens of every batch; None: those of its longest text, or `max_length` if all rows
            are stored.

    Raises:
        UsageError: `length` does not fit a cache of whole rows.

    Examples:
        >>> from enginecast.cache import as_dataset, collate, open_cache
        >>> from torch.utils.data import DataLoader
        >>> cache = open_cache("captions.cache")
        >>> loader = DataLoader(as_dataset(cache), 2, collate_fn=collate(cache.spec))
        >>> next(iter(loader))["last_hidden_state"].shape[0]
        2
    """
    if spec.rows == "all" and length not in (None, spec.max_length):
        raise UsageError(
            f"length: expected {spec.max_length}, to which the cached texts are padded, got "
            f"{length}"
        )
    return Collate(spec, length)


class ShardShuffle(Sampler[int]):
    """Shuffles for slow disks: reads a few shards in full at a time, in random order.

    Args:
        dataset: the dataset to draw from, each item once.
        shards: how many shards to mix; more give a better shuffle and more random reads.
        seed: gives the order, together with the epoch; see `set_epoch`.

    Raises:
        UsageError: `shards` is below 1.

    Examples:
        >>> from enginecast.cache import ShardShuffle, as_dataset, open_cache
        >>> dataset = as_dataset(open_cache("captions.cache"))
        >>> sorted(ShardShuffle(dataset, seed=7)) == list(range(len(dataset)))
        True
    """

    def __init__(self, dataset: CachedDataset, *, shards: int = 4, seed: int = 0) -> None:
        if shards < 1:
            raise UsageError(f"shards: expected at least 1, got {shards}")
        self._items_of = dataset.shards()
        self._shards = shards
        self._seed = seed
        self._epoch = 0

    def __repr__(self) -> str:
        count = len(self)
        return f"ShardShuffle({count:,} items, {self._shards} shards at a time, seed {self._seed})"

    def __len__(self) -> int:
        return len(self._items_of)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch.

        Args:
            epoch: the epoch's number, from 0.
        """
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self._seed, self._epoch))
        order = random.permutation(np.unique(self._items_of))
        for start in range(0, len(order), self._shards):
            group = np.flatnonzero(np.isin(self._items_of, order[start : start + self._shards]))
            yield from random.permutation(group).tolist()


def as_batch(
    spec: EncoderSpec,
    output: OutputSpec,
    entries: Sequence[Entry],
    sequence: int,
    masks: Sequence[Array | None] = (),
) -> Tensor:
    """An output of some texts: [texts, sequence, width], zeros where nothing is stored.

    An output per text is [texts, width].  There may be none.

    Args:
        masks: where a text's tokens are, which may be before and behind its padding; none: on the
            side that is not padded.
    """
    shape = (len(entries), sequence) if output.per == "token" else (len(entries),)
    batch = np.zeros((*shape, output.width), np.dtype(output.dtype))
    for row, entry, mask in zip_longest(batch, entries, masks):
        stored, begin = entry.outputs[output.name], 0
        if output.per == "token" and spec.keep_end and mask is not None:
            row[np.flatnonzero(mask)[spec.skip_rows :]] = stored
            continue
        if output.per == "token":
            left = spec.rows == "real" and spec.padding_side == "left"
            begin = spec.skip_rows + (sequence - len(entry.ids) if left else 0)
        row[begin : begin + len(stored)] = stored
    made: Tensor = as_tensor(batch)
    return made


@dataclass(frozen=True)
class LookUp:
    """Adds the outputs to a batch of a Hugging Face dataset.  See `as_huggingface`."""

    cache: EmbeddingCache
    column: str

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        if self.column not in batch:  # somebody reads another column alone
            return dict(batch)
        texts = require_texts(batch[self.column], f"column {self.column!r}")
        items = [item_of(entry) for entry in self.cache.get_many(self.cache.keys_of(texts))]
        names = ADDED + tuple(one.name for one in self.cache.spec.outputs)
        return {**batch, **{name: [item[name] for item in items] for name in names}}


def as_huggingface(cache: EmbeddingCache, dataset: Any = None, *, column: str = "caption") -> Any:
    """Add the outputs to the items of a `datasets.Dataset`.

    They are looked up by text when an item is read, because Arrow has no bfloat16 and would copy
    them.  On disk, the dataset keeps only its texts.

    Args:
        cache: an open cache.
        dataset: a dataset with a column of texts; None: make one of the cache's texts.
        column: the name of that column.

    Returns:
        The dataset with a transform, which adds the fields of `as_dataset`, except for `text`, to
        its own columns.

    Raises:
        UsageError: there is no such dataset or column, the column is not text, or its name is that
            of an output; or the dataset has a format or transform, which would be lost.
            When an item is read: its text is None.
        CacheMissError: when an item is read: its text is not in the cache.
        MissingError: `datasets` is not installed.

    Examples:
        >>> from enginecast.cache import as_huggingface, open_cache
        >>> dataset = as_huggingface(open_cache("captions.cache"))
        >>> sorted(dataset[0])
        ['attention_mask', 'caption', 'input_ids', 'last_hidden_state']
    """
    with required("datasets", "as_huggingface", "cache"):
        import datasets
    if dataset is None:
        features = datasets.Features({column: datasets.Value("string")})
        dataset = datasets.Dataset.from_dict({column: list(cache.texts())}, features)
    if not isinstance(dataset, datasets.Dataset):
        instead = "Outputs are looked up by item: load the dataset without streaming."
        if isinstance(dataset, Mapping):
            instead = f"Give one of its splits: {', '.join(map(repr, dataset))}."
        raise UsageError(
            f"as_huggingface: expected a datasets.Dataset, got {type(dataset).__name__}",
            hint=instead,
        )
    if (kind := dataset.format["type"]) is not None:
        raise UsageError(
            f"as_huggingface: the dataset has the format {kind!r} (with_transform, with_format), "
            "which would be replaced",
            hint="Take it off, dataset.with_format(None), and do its work in collate_fn.",
        )
    names = dataset.column_names
    if column not in names:
        raise UsageError(f"column: expected one of {', '.join(names)}, got {column!r}")
    feature = dataset.features[column]
    kind = getattr(feature, "dtype", type(feature).__name__)
    if kind not in _TEXTS:
        raise UsageError(f"column {column!r}: expected texts, got {kind}")
    added = {*ADDED, *(one.name for one in cache.spec.outputs)}
    taken = [name for name in names if name in added]
    if taken:
        raise UsageError(
            f"as_huggingface: the dataset has columns {', '.join(taken)} already, which would be "
            "overwritten",
            hint="Name them otherwise (rename_columns), or take them out (remove_columns).",
        )
    return dataset.with_transform(LookUp(cache, column))
