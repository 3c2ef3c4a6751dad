"""Fills: what is stored is what the encoder gives, once, whatever ends a fill."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fill_fixtures import (
    Lines,
    TableEncoder,
    WordTokenizer,
    captions,
    encodings,
    entries_of,
    fill,
    require_all,
    spec,
)

from enginecast.cache.store.records import read_failures
from enginecast.cache.store.spec import EncoderSpec

SPECS = {
    "real": spec(),
    "left": spec(padding_side="left"),
    "all": spec(mask=False, rows="all"),
    "unmasked": spec(mask=False),
    "unmasked left": spec(mask=False, padding_side="left"),
    "one more": spec(extra_rows=1),
    "skipped": spec(skip_rows=2),
    "skipped left": spec(skip_rows=2, rows="all", padding_side="left"),
}


@pytest.mark.parametrize("made", SPECS.values(), ids=SPECS)
def test_what_is_stored_is_what_the_encoder_gives_alone(tmp_path: Path, made: EncoderSpec) -> None:
    encoder, texts = TableEncoder(made), captions(60)
    where = encodings(tmp_path / "cache", encoder)
    filled = fill(where, encoder, texts)
    assert (filled.schedule.texts, filled.schedule.unique) == (60, 61)
    assert (filled.done.texts, filled.done.failures) == (61, [])
    require_all(where, texts)
    found = {entry.text: entry for entry in entries_of(where)}
    for text in [*texts, ""]:
        ids = WordTokenizer().tokens([text])[0].ids
        wanted = alone(TableEncoder(made), ids)
        got = found[text]
        assert got.ids.tolist() == ids.tolist()
        np.testing.assert_array_equal(got.outputs["last_hidden_state"], wanted["last_hidden_state"])
        np.testing.assert_allclose(
            got.outputs["pooler_output"], wanted["pooler_output"], rtol=0, atol=1e-5
        )  # summed over another number of zeros


def alone(encoder: TableEncoder, ids: Any) -> dict[str, Any]:
    """Outputs of one text in its own batch, by hand."""
    made, count = encoder.spec, len(ids)
    length = made.max_length if made.padded else count
    begin = length - count if made.padding_side == "left" else 0
    row, mask = np.zeros((1, length), np.int64), np.zeros((1, length), np.int64)
    row[0, begin : begin + count] = ids
    mask[0, begin : begin + count] = 1
    outputs = encoder.encode(row, mask if made.mask else np.ones_like(mask))
    rows = outputs["last_hidden_state"][0]
    if made.rows == "real":
        rows = rows[begin : begin + count + made.extra_rows]
    return {
        "last_hidden_state": rows[made.skip_rows :],
        "pooler_output": outputs["pooler_output"][0],
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_listed_and_not_stored(tmp_path: Path, value: float) -> None:
    texts = Lines([*captions(40, longest=5), "w5 w90", "w90", "w7 w8 w90 w90"])
    broken = [text for text in texts if "w90" in text.split()]
    encoder = TableEncoder(broken=90, breaks_to=value)
    where = encodings(tmp_path / "cache", encoder)
    filled = fill(where, encoder, texts)
    assert sorted(failure.text for failure in filled.done.failures) == sorted(broken)
    reasons = {failure.text: failure.reason for failure in filled.done.failures}
    assert reasons["w5 w90"] == "last_hidden_state: 4 of 12 values are not finite in bfloat16"
    assert sorted(one.text for one in read_failures(where)) == sorted(broken)
    require_all(where, Lines(text for text in texts if text not in broken))
    whole = fill(where, TableEncoder(), texts)
    assert (whole.done.texts, whole.done.failures) == (len(broken), [])
    assert read_failures(where) == []
    require_all(where, texts)


def test_two_writers_share_the_work(tmp_path: Path) -> None:
    texts = captions(300)
    where = encodings(tmp_path / "cache", TableEncoder())
    encoders = [TableEncoder(), TableEncoder()]
    given = [texts, Lines(reversed(texts))]
    threads = [
        threading.Thread(target=fill, args=(where, encoder, lines))
        for encoder, lines in zip(encoders, given, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require_all(where, texts)
    encoded = [sum(rows for rows, _ in encoder.batches) for encoder in encoders]
    assert sum(encoded) == 301, encoded
