"""Reading a cache without torch: by number, ids, text; in other processes; damage is found."""

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cached_models import tokenizer_of

from enginecast.cache.encoders.tokenizing import Tokenizing, digest_of
from enginecast.cache.read.reader import EmbeddingCache, open_cache
from enginecast.cache.store.folders import Encodings, create_store
from enginecast.cache.store.shard import Entry
from enginecast.cache.store.spec import About, EncoderSpec, Keys, OutputSpec, pad_rows
from enginecast.errors import CacheError, CacheMissError, UsageError

TOKENIZER = tokenizer_of().to_str().encode()
TEXTS = [" ".join("abcdefgh"[: 1 + number % 7]) + " x" * (number // 7) for number in range(21)]


def spec_of(**fields: Any) -> EncoderSpec:
    plain: dict[str, Any] = {"padding_id": 0, "max_length": 12, "mask": True, "rows": "real"}
    return EncoderSpec(
        model={"weights": "a"},
        precision="fp32",
        tokenizer=digest_of(TOKENIZER),
        outputs=(
            OutputSpec(name="last_hidden_state", per="token", width=5, dtype="bfloat16"),
            OutputSpec(name="pooler_output", per="text", width=3, dtype="float32"),
        ),
        **{**plain, **fields},
    )


def entries_of(spec: EncoderSpec, texts: list[str]) -> list[Entry]:
    """Synthetic outputs, which follow from the ids alone."""
    keys, made = Keys(spec), []
    for text, tokens in zip(texts, Tokenizing(TOKENIZER, spec).tokens(texts), strict=True):
        random = np.random.default_rng(tokens.ids.tolist())
        begin, end = spec.span(len(tokens.ids))
        rows = random.normal(size=(end - begin, 5)).astype(ml_dtypes.bfloat16)
        pooled = random.normal(size=3).astype(np.float32)
        outputs = {"last_hidden_state": rows, "pooler_output": pooled}
        made.append(Entry(keys.of_tokens(tokens.ids), text, tokens.ids, outputs))
    return made


def fill(root: Path, spec: EncoderSpec, texts: list[str]) -> Encodings:
    about = About(encoder="T5EncoderModel", source="synthetic")
    encodings = create_store(root).add("text_encoder", spec, about, TOKENIZER)
    entries = entries_of(spec, texts)
    for start in range(0, len(entries), 5):
        encodings.commit(entries[start : start + 5])
    return encodings


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fill(tmp_path / "cache", spec_of(), TEXTS)
    return tmp_path / "cache"


def assert_same(got: Entry, wanted: Entry) -> None:
    assert (got.key, got.ids.tolist()) == (wanted.key, wanted.ids.tolist())
    for name, values in wanted.outputs.items():
        assert got.outputs[name].dtype == values.dtype
        np.testing.assert_array_equal(got.outputs[name], values)


def test_every_way_to_ask_gives_the_same(root: Path) -> None:
    cache = open_cache(root)
    wanted = {entry.text: entry for entry in entries_of(cache.spec, TEXTS)}
    assert len(cache) == len(TEXTS)
    assert sorted(cache.texts()) == sorted(TEXTS)
    for number, text in enumerate(cache.texts()):
        entry = wanted[text]
        padded = pad_rows(cache.spec, [entry.ids], cache.spec.max_length)[0][0]
        assert_same(cache.by_row(number), entry)
        assert_same(cache.by_text(text), entry)
        assert_same(cache.by_ids(entry.ids), entry)
        assert_same(cache.by_ids(entry.ids.tolist()), entry)
        assert_same(cache.by_ids(padded, np.arange(12) < len(entry.ids)), entry)
        assert_same(cache.get_many([entry.key])[0], entry)


def test_many_come_back_in_the_order_they_were_asked_for(root: Path) -> None:
    cache = open_cache(root)
    random = np.random.default_rng(3)
    numbers = random.integers(0, len(cache), 50).tolist()
    texts = list(cache.texts())
    assert [one.text for one in cache.get_many(numbers)] == [texts[number] for number in numbers]
    mixed: list[int | bytes | str] = [3, texts[9], cache.by_row(4).key, texts[0]]
    assert [one.text for one in cache.get_many(mixed)] == [texts[at] for at in (3, 9, 4, 0)]
    assert cache.get_many([]) == []


def flip(cache: EmbeddingCache, text: str) -> Path:
    """Damage a byte of the outputs of a text."""
    entry = cache.by_text(text)
    raw = entry.outputs["last_hidden_state"].view(np.uint8).tobytes()
    for path in cache.encodings.shard_paths():
        data = bytearray(path.read_bytes())
        at = data.find(raw)
        if at >= 0:
            data[at + 3] ^= 4
            path.write_bytes(data)
            return path
    raise AssertionError("no shard has it")


def test_damaged_outputs_are_found_when_they_are_first_read(root: Path) -> None:
    path = flip(open_cache(root), "a b c")
    for check in ("first", "always"):
        cache = open_cache(root, check=check)
        for _ in range(2):
            with pytest.raises(CacheError, match="'a b c' differ from their sum") as error:
                cache.by_text("a b c")
            assert str(path) in str(error.value)
            assert "cache verify" in str(error.value)
        assert cache.by_text("a b").text == "a b"
    assert open_cache(root, check="never").by_text("a b c").text == "a b c"


def test_threads_read_at_once(root: Path) -> None:
    cache = open_cache(root)
    wanted = {entry.text: entry for entry in entries_of(cache.spec, TEXTS)}
    wrong: list[str] = []

    def read(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, len(cache), 200):
            got = cache.by_row(int(number))
            same = np.array_equal(
                got.outputs["last_hidden_state"], wanted[got.text].outputs["last_hidden_state"]
            )
            if not same:
                wrong.append(got.text)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_wrong_questions(root: Path) -> None:
    cache = open_cache(root)
    with pytest.raises(IndexError, match=r"expected an entry 0\.\.20, got 21"):
        cache.by_row(21)
    with pytest.raises(CacheError, match="expected one row of whole numbers"):
        cache.by_ids([[1, 2]])  # type: ignore[list-item]
    with pytest.raises(CacheError, match="the mask has gaps"):
        cache.by_ids([2, 3, 1, 0], [1, 0, 1, 0])
    with pytest.raises(CacheError, match="expected padding on the right"):
        cache.by_ids([0, 2, 3, 1], [0, 1, 1, 1])
    with pytest.raises(CacheError, match="one value for each of 4 ids"):
        cache.by_ids([2, 3, 1, 0], [1, 1, 1])
    with pytest.raises(CacheMissError, match="no entry of key 0000"):
        cache.get_many([bytes(16)])
    with pytest.raises(UsageError, match="check: expected first, always or never"):
        open_cache(root, check="now")  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="no encoder 'other'"):
        open_cache(root, "other")


def test_a_changed_tokenizer_is_refused(root: Path) -> None:
    path = root / "text_encoder" / "tokenizer.json"
    path.write_bytes(TOKENIZER.replace(b'"q"', b'"Q"'))
    cache = open_cache(root)
    assert cache.by_row(0).text in TEXTS  # which needs no tokenizer
    with pytest.raises(CacheError, match=r"tokenizer\.json"):
        cache.by_text("a")
