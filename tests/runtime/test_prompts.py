"""Prompts to batches, and tensors in files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundles
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from enginecast.errors import BundleError, InputError
from enginecast.runtime.bundle.manifest import Input
from enginecast.runtime.bundle.tensor_files import read_tensors
from enginecast.runtime.prompts import PromptEncoder, encode_prompts, read_prompts
from enginecast.runtime.text_generation import CONTEXT, PART, Row

PAD, END, UNKNOWN = 0, 1, 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bundles.write_tokenizer(tmp_path)
    return tmp_path


def word(folder: Path, text: str) -> int:
    identifier: int = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][text]
    return identifier


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WHOLE = "two  cats, \u65e5\u672c\u8a9e \N{FOX FACE}h\u00e9llo w\u00f6rld"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=264, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WHOLE], trainer)
    return tokenizer


def sentence_piece() -> Tokenizer:
    """As Llama's: letters by words with a space before them, and bytes of all others."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["two cats hello world,"], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []  # bytes are of the vocabulary, and not special
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_text_grows_by_whole_characters_wherever_the_prompt_ends(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer = make()
    ids = tokenizer.encode(WHOLE).ids
    assert len(ids) > len(WHOLE)
    for place in range(len(ids)):
        before = tokenizer.decode(ids[:place])
        if before.endswith(PART):
            continue
        row = Row(tokenizer, ids[max(0, place - CONTEXT) : place], place)
        pieces = []
        for token in ids[place:-1]:
            row.take(token, ())
            pieces.append(row.piece)
        row.take(ids[-1], ids[-1:])  # what ends it is no text
        assert not any(PART in piece for piece in pieces)
        assert "".join(pieces) == row.text == tokenizer.decode(ids[:-1])[len(before) :]
    half = ids[: next(n for n in range(len(ids)) if tokenizer.decode(ids[:n]).endswith(PART))]
    row = Row(tokenizer, [], 0)
    for token in half:
        row.take(token, ())
    assert PART not in row.text
    row.finish()
    assert row.text == tokenizer.decode(half)


def prompts_of(tmp_path: Path, data: bytes) -> list[str]:
    path = tmp_path / "prompts.txt"
    path.write_bytes(data)
    return read_prompts(path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"red\nfox\n", ["red", "fox"]),
        (b"red\nfox", ["red", "fox"]),
        (b"red\n\nfox\n", ["red", "", "fox"]),
        (b"\n", [""]),
        (b"red\r\nfox\r\n", ["red", "fox"]),
        (b"\xef\xbb\xbfred\n", ["red"]),
        ("a\u2028b\x0bc\n".encode(), ["a\u2028b\x0bc"]),
        (b"  red \n", ["  red "]),
    ],
)
def test_one_prompt_a_line(tmp_path: Path, data: bytes, expected: list[str]) -> None:
    assert prompts_of(tmp_path, data) == expected


def test_truncation_is_counted_and_keeps_the_end_token(folder: Path) -> None:
    fox = word(folder, "fox")
    result = encode_prompts(folder, bundles.manifest(), ["fox " * 9, "fox " * 4, "fox " * 5])
    assert result.truncated == 2
    assert result.batches[0]["input_ids"].tolist() == [[fox, fox, fox, fox, END]] * 3
    assert result.lengths == (5, 5, 5)


@pytest.mark.parametrize(("count", "sizes"), [(4, [4]), (5, [2, 3]), (8, [4, 4]), (9, [3, 3, 3])])
def test_many_prompts_become_several_batches(folder: Path, count: int, sizes: list[int]) -> None:
    prompts = [" ".join(["fox"] * (index % 4)) for index in range(count)]
    result = encode_prompts(folder, bundles.manifest(), prompts)
    assert [len(batch["input_ids"]) for batch in result.batches] == sizes
    rows = [row for batch in result.batches for row in batch["attention_mask"]]
    assert [int(row.sum()) for row in rows] == [index % 4 + 1 for index in range(count)]
    assert result.lengths == tuple(index % 4 + 1 for index in range(count))


def test_engines_without_text_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="it has no tokenizer"):
        encode_prompts(folder, bundles.manifest(text=None), ["red"])
    image = Input(name="pixels", kind="image", dtype="float32", shape=("batch", 3))
    with pytest.raises(InputError, match="'pixels': expected int64 token ids"):
        encode_prompts(folder, bundles.manifest(inputs=(image,)), ["red"])
    mask = bundles.manifest().inputs[1]
    with pytest.raises(InputError, match="expected an engine that takes token ids"):
        encode_prompts(folder, bundles.manifest(inputs=(mask,)), ["red"])


def test_a_missing_or_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a tokenizer"):
        encode_prompts(folder, bundles.manifest(), ["red"])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"expected tokenizer\.json"):
        encode_prompts(folder, bundles.manifest(), ["red"])


@pytest.mark.parametrize("data", [b"", b"hello", b"\xff" * 64])
def test_files_that_are_not_safetensors(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "in.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"in\.safetensors: expected a safetensors file"):
        read_tensors(path)


CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
LETTER = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
MISSING = [{"SpecialToken": {"id": "</s>", "type_id": 0}}]
TEMPLATE = {"type": "TemplateProcessing", "single": MISSING, "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": CHARSMAP},  # these three are panics of Rust
        {"post_processor": TEMPLATE},
        {"pre_tokenizer": ENDLESS},
        {"model": LETTER},
    ],
)
def test_a_hostile_tokenizer_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    content = json.loads(bundles.write_tokenizer(tmp_path).read_bytes()) | change
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        PromptEncoder(tmp_path, bundles.manifest(), json.dumps(content).encode())(["a" * 40 + "!"])
