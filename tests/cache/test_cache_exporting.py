"""Exports: what other tools read is what the cache holds."""

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from cache_entries import SPEC, entries, fill, texts
from pyarrow import parquet
from safetensors.torch import load_file

from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.shard import Entry
from enginecast.cache.upkeep.exporting import export
from enginecast.errors import CacheError

TEXTS = texts(12)
MADE = {entry.text: entry for entry in entries(TEXTS)}


@pytest.fixture
def encodings(tmp_path: Path) -> Encodings:
    made = list(MADE.values())
    return fill(tmp_path / "cache", made[:7], made[5:])


def lines(folder: Path) -> Iterator[tuple[Entry, Path]]:
    """Each text of the index, and its file."""
    reported = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    assert sorted(one["text"] for one in reported) == sorted(TEXTS)
    for one in reported:
        wanted = MADE[one["text"]]
        assert one["tokens"] == len(wanted.ids)
        assert Path(one["file"]).stem == wanted.key.hex()
        yield wanted, folder / one["file"]
    assert len(list(folder.rglob("*.*"))) == 13


def test_a_parquet_file_has_every_entry(encodings: Encodings, tmp_path: Path) -> None:
    done = export(encodings, tmp_path / "out.parquet")
    assert (done.texts, done.bytes) == (12, (tmp_path / "out.parquet").stat().st_size)
    table = parquet.read_table(tmp_path / "out.parquet")
    rows = table.to_pylist()
    assert sorted(row["text"] for row in rows) == sorted(TEXTS)
    for row in rows:
        wanted = MADE[row["text"]]
        assert row["ids"] == wanted.ids.tolist()
        for name, values in wanted.outputs.items():
            kinds = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
            dtype = np.dtype(kinds[row[f"{name}_dtype"]])
            got = np.frombuffer(row[name], dtype).reshape(row[f"{name}_shape"])
            assert got.dtype == values.dtype
            np.testing.assert_array_equal(got, values)
    assert str(table.schema.field("last_hidden_state").type) == "large_binary"
    spec = json.loads(table.schema.metadata[b"enginecast.spec"])
    assert spec["tokenizer"] == SPEC.tokenizer


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_a_file_of_tensors_for_each_text(encodings: Encodings, tmp_path: Path, form: str) -> None:
    done = export(encodings, tmp_path / "out", form)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert (done.texts, done.bytes) == (12, sum(path.stat().st_size for path in files))
    for wanted, file in lines(tmp_path / "out"):
        got = load_file(file) if form == "safetensors" else torch.load(file, weights_only=True)
        assert got["last_hidden_state"].dtype == torch.bfloat16
        assert got["ids"].tolist() == wanted.ids.tolist()
        for name, values in wanted.outputs.items():
            assert got[name].float().numpy().tolist() == values.astype(np.float32).tolist()
        assert got["last_hidden_state"].untyped_storage().nbytes() == len(wanted.ids) * 5 * 2


@pytest.mark.parametrize("form", ["parquet", "pt"])
def test_nothing_is_overwritten(encodings: Encodings, tmp_path: Path, form: str) -> None:
    for kind in ("file", "folder"):
        target = tmp_path / kind
        target.write_text("mine") if kind == "file" else target.mkdir()
        with pytest.raises(CacheError, match="already exists"):
            export(encodings, target, form)
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "folder").iterdir()) == []
