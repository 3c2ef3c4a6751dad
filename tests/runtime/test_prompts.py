"""Prompts to batches, and tensors in files."""

import json
from pathlib import Path
from typing import Any

import bundles
import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from enginecast.errors import BundleError, InputError
from enginecast.runtime.bundle.manifest import Input
from enginecast.runtime.bundle.tensor_files import read_tensors, write_tensors
from enginecast.runtime.prompts import PromptEncoder, encode_prompts, read_prompts

PAD, END, UNKNOWN = 0, 1, 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bundles.write_tokenizer(tmp_path)
    return tmp_path


def word(folder: Path, text: str) -> int:
    identifier: int = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][text]
    return identifier


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


def test_prompts_that_are_not_utf8_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts\.txt:2: expected UTF-8"):
        prompts_of(tmp_path, b"red\nf\xf6x\n")


def test_a_batch_is_padded_to_its_longest(folder: Path) -> None:
    red, fox = word(folder, "red"), word(folder, "fox")
    result = encode_prompts(folder, bundles.manifest(), ["red fox", "", "wolf"])
    (batch,) = result.batches
    assert list(batch) == ["input_ids", "attention_mask"]
    assert batch["input_ids"].tolist() == [[red, fox, END], [END, PAD, PAD], [UNKNOWN, END, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}
    assert result.lengths == (3, 1, 2)
    assert result.truncated == 0


def test_truncation_is_counted_and_keeps_the_end_token(folder: Path) -> None:
    fox = word(folder, "fox")
    result = encode_prompts(folder, bundles.manifest(), ["fox " * 9, "fox " * 4, "fox " * 5])
    assert result.truncated == 2
    assert result.batches[0]["input_ids"].tolist() == [[fox, fox, fox, fox, END]] * 3
    assert result.lengths == (5, 5, 5)


def test_padding_and_truncation_of_the_tokenizer_file_do_not_count(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    content["padding"] = {
        "strategy": {"Fixed": 6},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    path.write_text(json.dumps(content))
    assert encode_prompts(folder, bundles.manifest(), ["red green fox"]).lengths == (4,)


@pytest.mark.parametrize(("count", "sizes"), [(4, [4]), (5, [2, 3]), (8, [4, 4]), (9, [3, 3, 3])])
def test_many_prompts_become_several_batches(folder: Path, count: int, sizes: list[int]) -> None:
    prompts = [" ".join(["fox"] * (index % 4)) for index in range(count)]
    result = encode_prompts(folder, bundles.manifest(), prompts)
    assert [len(batch["input_ids"]) for batch in result.batches] == sizes
    rows = [row for batch in result.batches for row in batch["attention_mask"]]
    assert [int(row.sum()) for row in rows] == [index % 4 + 1 for index in range(count)]
    assert result.lengths == tuple(index % 4 + 1 for index in range(count))


def test_static_sizes_are_met_or_refused(folder: Path) -> None:
    ids, _ = bundles.manifest().inputs
    static = bundles.manifest(inputs=(msgspec.structs.replace(ids, shape=(2, 4)),))
    (batch,) = encode_prompts(folder, static, ["red", "red fox"]).batches
    assert batch["input_ids"].shape == (2, 4)
    for count in (1, 3):
        with pytest.raises(InputError, match=rf"batches of 2\.\.2, which {count} do not fill"):
            encode_prompts(folder, static, ["red"] * count)


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


TENSORS = {
    "bf16": torch.tensor([[1.5, -3e38]]).bfloat16(),
    "fp16": torch.tensor([0.5]).half(),
    "fp32": torch.rand(2, 3, generator=torch.Generator().manual_seed(1)),
    "ids": torch.tensor([[1, 2]]),
    "mask": torch.tensor([True, False]),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 2),
}


def test_files_from_torch_are_read_and_written_back(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "in.safetensors")
    arrays = read_tensors(tmp_path / "in.safetensors")
    assert arrays["bf16"].dtype == ml_dtypes.bfloat16
    write_tensors(tmp_path / "out.safetensors", arrays)
    again = load_file(tmp_path / "out.safetensors")
    assert again.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)


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
