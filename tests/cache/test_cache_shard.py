"""Shards: what is written comes back, and one flipped bit anywhere is found."""

from pathlib import Path

import numpy as np
import pytest
from cache_shards import SPEC, entries, flip

from enginecast.cache.store.shard import Shard, open_shard, shard_name, write_shard
from enginecast.cache.store.spec import EncoderSpec, OutputSpec, differences, fingerprint
from enginecast.errors import CacheError


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    made = entries(range(9))
    path = tmp_path / shard_name([entry.key for entry in made])
    write_shard(path, SPEC, made)
    return path


def damaged(shard: Shard) -> list[int]:
    return [text for text in range(len(shard)) if not shard.is_whole(text)]


def test_what_is_written_comes_back(shard: Path) -> None:
    found = open_shard(shard, SPEC)
    assert len(found) == 9
    assert damaged(found) == []
    for number, wanted in enumerate(entries(range(9))):
        got = found.entry(number)
        assert (got.key, got.text, got.ids.tolist()) == (wanted.key, wanted.text, [*wanted.ids])
        for name, values in wanted.outputs.items():
            assert got.outputs[name].dtype == values.dtype
            np.testing.assert_array_equal(got.outputs[name], values)


def test_every_flipped_bit_is_found(shard: Path) -> None:
    data = shard.read_bytes()
    texts_hit = 0
    for bit in range(0, len(data) * 8, 3):
        flip(shard, bit)
        try:
            hit = damaged(open_shard(shard, SPEC))
        except CacheError as error:
            assert str(shard) in str(error)  # noqa: PT017  # thousands of flips, of both kinds
        else:
            assert len(hit) == 1, f"bit {bit}"
            texts_hit += 1
        flip(shard, bit)
    assert shard.read_bytes() == data
    assert texts_hit > 1000


def test_a_cut_shard_is_refused(shard: Path) -> None:
    data = shard.read_bytes()
    for size in (0, 7, 8, 200, len(data) - 1):
        shard.write_bytes(data[:size])
        with pytest.raises(CacheError, match="damaged"):
            open_shard(shard, SPEC)


def fields(spec: EncoderSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in EncoderSpec.__struct_fields__}


@pytest.mark.parametrize("field", EncoderSpec.__struct_fields__)
def test_every_field_changes_the_fingerprint(field: str) -> None:
    other = {
        "model": {"weights": "b"},
        "engine": {"file": "c"},
        "precision": "bf16",
        "tokenizer": "cd",
        "template": "a photo of {}",
        "clean": "strip",
        "special_tokens": False,
        "keep_end": True,
        "max_length": 9,
        "padding_id": 1,
        "padding_side": "left",
        "mask": False,
        "rows": "all",
        "extra_rows": 1,
        "skip_rows": 1,
        "outputs": SPEC.outputs[:1],
    }
    changed = EncoderSpec(**{**fields(SPEC), field: other[field]})  # type: ignore[arg-type]
    assert fingerprint(changed) != fingerprint(SPEC)
    assert [one.split(":")[0] for one in differences(SPEC, changed)] == [field]


def test_the_fingerprint_of_an_older_version_stays() -> None:
    output = OutputSpec(name="x", per="token", width=2, dtype="float32")
    spec = EncoderSpec(
        model={"w": "ab", "c": "q"},
        precision="fp32",
        tokenizer="ab",
        max_length=9,
        padding_id=0,
        mask=True,
        rows="real",
        outputs=(output,),
    )
    assert fingerprint(spec) == "de9270eee4a4e52243c7368a0bd5fcae"


def test_a_shard_of_another_spec_is_refused(shard: Path) -> None:
    other = EncoderSpec(**{**fields(SPEC), "max_length": 9})  # type: ignore[arg-type]
    with pytest.raises(CacheError, match=f"expected a shard of spec {fingerprint(other)}"):
        open_shard(shard, other)
