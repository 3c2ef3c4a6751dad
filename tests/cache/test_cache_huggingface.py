"""A dataset of Hugging Face with the outputs: into batches, and what is refused."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from test_cache_reader import TEXTS, fill, spec_of
from torch.utils.data import DataLoader

from enginecast.cache import as_dataset, as_huggingface, collate
from enginecast.cache.read.reader import EmbeddingCache
from enginecast.errors import UsageError

COUNT = 6


@pytest.fixture
def cache(tmp_path: Path) -> EmbeddingCache:
    return EmbeddingCache(fill(tmp_path / "cache", spec_of(), TEXTS), check="first")


def dataset_of(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"caption": TEXTS[:COUNT], **columns})


def test_a_loader_keeps_the_other_columns(cache: EmbeddingCache) -> None:
    """What default_collate can stack is stacked; boxes of different numbers stay a list."""
    own = dataset_of(
        label=list(range(COUNT)),
        boxes=[[1] * number for number in range(COUNT)],
        name=[f"{number}.png" for number in range(COUNT)],
        nothing=[None] * COUNT,
    )
    loader: Any = DataLoader(as_huggingface(cache, own), 4, collate_fn=collate(cache.spec))
    batches = list(loader)
    assert [batch["label"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]
    assert batches[1]["boxes"] == [[1] * 4, [1] * 5]
    assert batches[1]["name"] == ["4.png", "5.png"]
    assert batches[1]["caption"] == TEXTS[4:6]
    assert batches[1]["nothing"] == [None, None]
    assert "text" not in batches[1]
    wanted = collate(cache.spec)(as_dataset(cache, TEXTS[4:6]).__getitems__([0, 1]))
    for name in ("input_ids", "attention_mask", "last_hidden_state", "pooler_output"):
        assert torch.equal(batches[1][name], wanted[name]), name


@pytest.mark.parametrize("wrong", [3, None, b"a b", ["a b"]])
def test_what_is_not_text_is_refused_with_its_place(cache: EmbeddingCache, wrong: Any) -> None:
    with pytest.raises(UsageError, match="texts: expected a text at 2, got"):
        as_dataset(cache, [*TEXTS[:2], wrong])
    with pytest.raises(UsageError, match="text: expected a text at 0, got"):
        cache.by_text(wrong)


def test_columns_that_would_be_overwritten_are_refused(cache: EmbeddingCache) -> None:
    own = dataset_of(input_ids=[[1, 2]] * COUNT, pooler_output=[0.5] * COUNT)
    with pytest.raises(UsageError, match="has columns input_ids, pooler_output already") as refused:
        as_huggingface(cache, own)
    assert "rename_columns" in refused.value.hint


def test_a_column_alone_is_read_without_the_cache(cache: EmbeddingCache) -> None:
    own = as_huggingface(cache, dataset_of(label=list(range(COUNT))))
    assert list(own["label"]) == list(range(COUNT))
    assert own.select_columns(["label"])[0] == {"label": 0}


def test_what_is_not_a_dataset_with_items_is_refused(cache: EmbeddingCache) -> None:
    splits = datasets.DatasetDict({"train": dataset_of()})
    with pytest.raises(
        UsageError, match=r"expected a datasets\.Dataset, got DatasetDict"
    ) as refused:
        as_huggingface(cache, splits)
    assert "train" in refused.value.hint
    streamed = dataset_of().to_iterable_dataset()
    with pytest.raises(UsageError, match=r"expected a datasets\.Dataset, got IterableDataset"):
        as_huggingface(cache, streamed)
