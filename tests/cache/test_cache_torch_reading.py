"""Datasets of a cache: of torch and of Hugging Face, in worker processes, padded to batches."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from test_cache_reader import TEXTS, fill, spec_of

from enginecast.cache.read.cached_encoder import CachedEncoder
from enginecast.cache.read.datasets import (
    as_dataset,
    as_huggingface,
    collate,
)
from enginecast.cache.read.reader import EmbeddingCache
from enginecast.runtime.device.torch_values import as_tensor

SPECS: dict[str, dict[str, Any]] = {
    "real": {},
    "left": {"padding_side": "left"},
    "all": {"rows": "all"},
    "no-mask": {"mask": False, "rows": "all"},
    "no-mask-left": {"mask": False, "padding_side": "left"},
    "extra": {"extra_rows": 1},
    "skip": {"skip_rows": 1},
    "skip-left": {"skip_rows": 1, "rows": "all", "padding_side": "left"},
}


@pytest.fixture
def cache(tmp_path: Path) -> EmbeddingCache:
    return EmbeddingCache(fill(tmp_path / "cache", spec_of(), TEXTS), check="first")


def test_items_are_what_is_stored(cache: EmbeddingCache) -> None:
    dataset = as_dataset(cache)
    assert len(dataset) == len(cache)
    for number in range(len(dataset)):
        item = dataset[number]
        entry = cache.by_row(number)
        assert item["text"] == entry.text
        assert item["input_ids"].tolist() == entry.ids.tolist()
        assert item["attention_mask"].tolist() == [1] * len(entry.ids)
        assert item["last_hidden_state"].dtype == torch.bfloat16
        assert item["pooler_output"].dtype == torch.float32
        for name, values in entry.outputs.items():
            assert torch.equal(item[name], as_tensor(values))
    assert dataset[-1]["text"] == dataset[len(dataset) - 1]["text"]


def test_nobody_changes_the_cache_through_an_item(cache: EmbeddingCache) -> None:
    dataset = as_dataset(cache)
    dataset[0]["last_hidden_state"].zero_()
    assert dataset[0]["last_hidden_state"].any()


@pytest.mark.parametrize("name", SPECS)
def test_batches_are_what_the_encoder_gives(tmp_path: Path, name: str) -> None:
    """The drop-in, which was compared with live encoders, lays rows out as these do."""
    spec = spec_of(**SPECS[name])
    cache = EmbeddingCache(fill(tmp_path / "cache", spec, TEXTS), check="first")
    length = spec.max_length if spec.padded else None
    made = collate(spec, length)(
        as_dataset(cache, [TEXTS[3], TEXTS[0], TEXTS[17]]).__getitems__([0, 1, 2])
    )
    mask = made["attention_mask"]
    longest = spec.max_length if spec.padded else int(mask.sum(1).max())
    assert made["input_ids"].shape == mask.shape == (3, longest)
    found = CachedEncoder(cache)(made["input_ids"], mask if spec.mask else None)
    assert torch.equal(made["last_hidden_state"], found.last_hidden_state)
    assert torch.equal(made["pooler_output"], found.pooler_output)
    outer = [0, -1] if spec.padding_side == "left" else [-1, 0]
    assert mask[1].sum() < longest
    assert mask[1][outer].tolist() == [0, 1]


def test_a_dataset_of_hugging_face_stays_text(cache: EmbeddingCache, tmp_path: Path) -> None:
    own = datasets.Dataset.from_dict({"caption": TEXTS[:6], "image": list(range(6))})
    dataset = as_huggingface(cache, own)
    assert dataset.column_names == ["caption", "image"]
    item = dataset[4]
    assert (item["caption"], item["image"]) == (TEXTS[4], 4)
    stored = as_tensor(cache.by_text(TEXTS[4]).outputs["last_hidden_state"])
    assert item["last_hidden_state"].dtype == torch.bfloat16
    assert torch.equal(item["last_hidden_state"], stored)
    dataset.with_format(None).save_to_disk(tmp_path / "saved")
    assert datasets.load_from_disk(tmp_path / "saved")[0] == {"caption": TEXTS[0], "image": 0}
    batch = dataset[2:4]
    assert len(batch["input_ids"]) == 2
