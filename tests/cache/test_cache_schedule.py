"""Schedules of a fill: what is wanted, what is missing, and the chunks it is cut into."""

from pathlib import Path

import numpy as np
import pytest
from fill_fixtures import Lines, TableEncoder, WordTokenizer, captions, encodings, spec

from enginecast.cache.fill.local import fill_chunk
from enginecast.cache.fill.schedule import FillSchedule, schedule_fill
from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.spec import EncoderSpec, Keys, OutputSpec

SPEC = spec()


def planned(
    texts: Lines, shard_bytes: int = 2000, made: EncoderSpec = SPEC, index: Index | None = None
) -> FillSchedule:
    where = Encodings(Path("nowhere"), made, TableEncoder().about)
    tokenizer = WordTokenizer(made.max_length)
    return schedule_fill(made, tokenizer, texts, index or open_index(where), shard_bytes)


def index_of(where: Encodings) -> Index:
    index = open_index(where)
    assert index.errors == ()
    return index


def test_equal_ids_are_one_text_and_the_empty_one_is_added() -> None:
    plan = planned(Lines(["w5 w6", "w7", "w5  w6", "w7", "w5 w6"]))
    assert (plan.texts, plan.unique, plan.cached, plan.to_do) == (5, 3, 0, 3)
    assert (plan.shortest, plan.median, plan.longest, plan.tokens) == (1, 2, 3, 6)
    wanted = [one for chunk in plan.chunks for one in chunk.wanted]
    assert [one.text for one in wanted] == ["w5 w6", "w7", ""]
    assert [one.ids.tolist() for one in wanted] == [[5, 6, 1], [7, 1], [1]]


def test_chunks_go_from_long_to_short_and_do_not_depend_on_the_order_of_texts() -> None:
    texts = captions(200)
    plan = planned(texts)
    wanted = [one for chunk in plan.chunks for one in chunk.wanted]
    order = [(-len(one.ids), one.key) for one in wanted]
    assert order == sorted(order)
    assert len({one.key for one in wanted}) == len(wanted) == plan.unique == 201
    again = planned(Lines(reversed(texts)))
    assert [chunk.name for chunk in again.chunks] == [chunk.name for chunk in plan.chunks]
    assert len({chunk.name for chunk in plan.chunks}) == len(plan.chunks) > 5


@pytest.mark.parametrize(
    "made",
    [
        SPEC,
        spec(mask=False, rows="all"),
        spec(extra_rows=1),
        spec(skip_rows=2),
        spec(outputs=(OutputSpec(name="pooler_output", per="text", width=3, dtype="float32"),)),
    ],
    ids=["real", "all", "extra", "skip", "pooled"],
)
def test_bytes_are_those_of_the_files_to_the_last_one(tmp_path: Path, made: EncoderSpec) -> None:
    encoder = TableEncoder(made)
    where = encodings(tmp_path / "cache", encoder)
    plan = planned(captions(150), made=made)
    for chunk in plan.chunks:
        fill_chunk(where, encoder, chunk, batch_tokens=64)
    assert plan.bytes == sum(path.stat().st_size for path in where.shard_paths())


def test_what_is_there_is_left_out_and_the_cuts_stay(tmp_path: Path) -> None:
    encoder, texts = TableEncoder(), captions(200)
    where = encodings(tmp_path / "cache", encoder)
    plan = planned(texts)
    fill_chunk(where, encoder, plan.chunks[2], batch_tokens=64)
    half = plan.chunks[4]
    fill_chunk(where, encoder, type(half)("half", half.wanted[::2]), batch_tokens=64)
    again = planned(texts, index=index_of(where))
    assert again.cached == len(plan.chunks[2].wanted) + len(half.wanted[::2])
    names = [chunk.name for chunk in plan.chunks]
    assert [chunk.name for chunk in again.chunks] == names[:2] + names[3:]
    assert [one.key for one in again.chunks[3].wanted] == [one.key for one in half.wanted[1::2]]


def test_texts_that_are_too_long_can_be_cut() -> None:
    texts = Lines(["w5", " ".join(["w9"] * 11), " ".join(["w9"] * 14)])
    where = Encodings(Path("nowhere"), SPEC, TableEncoder().about)
    plan = schedule_fill(SPEC, WordTokenizer(), texts, open_index(where), 2000, too_long="truncate")
    assert [(one.tokens, one.text) for one in plan.cut] == [(15, texts[2])]
    assert plan.cut[0].key in {one.key for chunk in plan.chunks for one in chunk.wanted}
    assert plan.longest == 12
    assert plan.unique == 3  # cut, it equals the second one


def test_keys_are_those_that_readers_make() -> None:
    for made in (SPEC, spec(mask=False, rows="all", padding_side="left")):
        keys = Keys(made)
        for chunk in planned(captions(30), made=made).chunks:
            for one in chunk.wanted:
                assert one.key == keys.of_tokens(one.ids.tolist())
                assert one.ids.dtype == np.int32
