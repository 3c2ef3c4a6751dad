"""A cache beside a dataset of Hugging Face, which stays text alone."""

from collections.abc import Mapping
from typing import Any

from enginecast.cache.asking import require_texts
from enginecast.cache.reader import EmbeddingCache
from enginecast.cache.torch_reading import item_of
from enginecast.errors import MissingError, UsageError

_TEXTS = ("string", "large_string", "string_view")
"""Types of Arrow that are texts, as `datasets` names them."""
ADDED = ("input_ids", "attention_mask")
"""Columns of every item besides the outputs."""


class LookUp:
    """Adds the outputs to a batch of a Hugging Face dataset.  See `as_huggingface`."""

    def __init__(self, cache: EmbeddingCache, column: str) -> None:
        self.cache = cache
        self.column = column

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        if self.column not in batch:  # somebody reads another column alone
            return dict(batch)
        texts = require_texts(batch[self.column], f"column {self.column!r}")
        items = [item_of(entry) for entry in self.cache.get_many(self.cache.keys_of(texts))]
        names = ADDED + tuple(one.name for one in self.cache.spec.outputs)
        return {**batch, **{name: [item[name] for item in items] for name in names}}


def as_huggingface(cache: EmbeddingCache, dataset: Any = None, *, column: str = "caption") -> Any:
    """A `datasets.Dataset` whose items have the outputs, too; on disk it stays text alone.

    Arrow has no bfloat16, and outputs in it would be copies: they are looked up when an item is
    read, by its text.

    Args:
        dataset: one with a column of texts; None: one of the cache's texts is made.
        column: of the texts.

    Returns:
        The dataset with a transform, which gives the items of `as_dataset` but `text`, besides its
        own columns.

    Raises:
        UsageError: no such dataset or column, a column that is no text, or one that is named as
            what would be added; a dataset with a format or transform, which would be lost.
            When an item is read: its text is None.
        CacheMissError: when an item is read: its text is not in the cache.
        MissingError: `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingError(
            "as_huggingface: datasets is not installed", hint="pip install 'enginecast[cache]'"
        ) from error
    if dataset is None:
        features = datasets.Features({column: datasets.Value("string")})
        dataset = datasets.Dataset.from_dict({column: list(cache.texts())}, features)
    if not isinstance(dataset, datasets.Dataset):
        raise UsageError(
            f"as_huggingface: expected a datasets.Dataset, got {type(dataset).__name__}",
            hint=_instead(dataset),
        )
    if (kind := dataset.format["type"]) is not None:
        raise UsageError(
            f"as_huggingface: the dataset has the format {kind!r} (with_transform, with_format), "
            "which would be replaced",
            hint="Take it off, dataset.with_format(None), and do its work in collate_fn.",
        )
    _check_columns(cache, dataset, column)
    return dataset.with_transform(LookUp(cache, column))


def _instead(dataset: Any) -> str:
    if isinstance(dataset, Mapping):
        return f"Give one of its splits: {', '.join(map(repr, dataset))}."
    return "Outputs are looked up by item: load the dataset without streaming."


def _check_columns(cache: EmbeddingCache, dataset: Any, column: str) -> None:
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
