"""Token ids are those of transformers' own tokenizers; digests tell tokenizers apart."""

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cache_fixtures import add_clip_tokenizer, add_t5_tokenizer, captions
from transformers import AutoTokenizer, ByT5Tokenizer

from enginecast.cache.encoders.tokenizer_files import find_tokenizer
from enginecast.cache.encoders.tokenizing import Tokenizing, digest_of
from enginecast.cache.store.spec import Clean, EncoderSpec, OutputSpec
from enginecast.errors import UsageError
from enginecast.runtime.text_form import clean_text, prepare_text

ADDERS = {"t5": add_t5_tokenizer, "clip": add_clip_tokenizer}


def spec(text: bytes, **changes: Any) -> EncoderSpec:
    made = EncoderSpec(
        model={"weights": "a"},
        precision="fp32",
        tokenizer=digest_of(text),
        max_length=20,
        padding_id=0,
        mask=True,
        rows="real",
        outputs=(OutputSpec(name="last_hidden_state", per="token", width=4, dtype="float32"),),
    )
    return msgspec.structs.replace(made, **changes)


def random_texts(count: int) -> list[str]:
    drawn = random.Random(7)
    letters = string.ascii_letters + " ,.-'\"()!?\t\néüß狐🦊&;<>/"
    noise = ["".join(drawn.choices(letters, k=drawn.randrange(60))) for _ in range(count)]
    return [
        "",
        " ",
        "<pad>",
        "</s> inside",
        "<|endoftext|> twice",
        *noise,
        *captions(count, seed=3),
    ]


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in content.items() if value != ""}))


@pytest.mark.parametrize("truncation_side", ["right", "left"])
@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("kind", ADDERS)
def test_ids_and_padding_are_those_of_transformers(
    tmp_path: Path, kind: str, padding_side: Any, truncation_side: str
) -> None:
    folder = ADDERS[kind](tmp_path)
    configure(folder, padding_side=padding_side, truncation_side=truncation_side)
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    facts = find_tokenizer(folder)
    assert facts.padding_id == theirs.pad_token_id
    assert facts.padding_side == theirs.padding_side == padding_side
    assert facts.max_length == theirs.model_max_length
    assert facts.last_id == len(theirs) - 1
    texts = random_texts(200)
    wanted = theirs(texts, padding="max_length", truncation=True, max_length=20)
    uncut = theirs(texts)["input_ids"]
    found = Tokenizing(facts.text, spec(facts.text)).tokens(texts)
    assert [one.length for one in found] == [len(ids) for ids in uncut]
    assert sum(one.length > 20 for one in found) > 50
    for one, ids, mask in zip(found, wanted["input_ids"], wanted["attention_mask"], strict=True):
        filling = [facts.padding_id] * (20 - len(one.ids))
        ours = one.ids.tolist()
        assert one.ids.dtype == np.int32
        assert (ours + filling if padding_side == "right" else filling + ours) == ids
        assert sum(mask) == len(ours)


def other_word(content: dict[str, Any]) -> None:
    content["model"]["vocab"][9][0] = "another"


def other_score(content: dict[str, Any]) -> None:
    content["model"]["vocab"][9][1] -= 0.5


def other_order(content: dict[str, Any]) -> None:
    content["model"]["vocab"][9:11] = reversed(content["model"]["vocab"][9:11])


def other_normalizer(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "NFC"}


def other_splitter(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = {"type": "Whitespace"}


def other_ending(content: dict[str, Any]) -> None:
    content["post_processor"] = None


def one_more_token(content: dict[str, Any]) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 999, "content": "<new>"})


@pytest.mark.parametrize(
    "change",
    [
        other_word,
        other_score,
        other_order,
        other_normalizer,
        other_splitter,
        other_ending,
        one_more_token,
    ],
)
def test_another_tokenizer_has_another_digest(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    text = (add_t5_tokenizer(tmp_path) / "tokenizer.json").read_bytes()
    content = json.loads(text)
    change(content)
    assert digest_of(json.dumps(content).encode()) != digest_of(text)


CLEANED: list[tuple[Clean, str, str]] = [
    ("none", "  A Fox\n", "  A Fox\n"),
    ("strip", "  A Fox\n", "A Fox"),
    ("lower-strip", "  A Föx\n", "a föx"),
    ("whitespace", " A \n\t Fox &amp;amp;  co ", "A Fox & co"),
    ("empty-is-space", "", " "),
    ("empty-is-space", " A Fox", " A Fox"),
    ("quoted", 'A "Fox" says “hi”, "Fox"', 'Text "Fox". Text "hi". '),
    ("quoted", "A Fox", ""),
]


@pytest.mark.parametrize(("how", "text", "wanted"), CLEANED)
def test_cleaning_goes_before_the_template(how: Clean, text: str, wanted: str) -> None:
    assert clean_text(how, text) == wanted
    made = spec(b"{}", clean=how, template="A photo of {}. ")
    assert prepare_text(made, text) == (f"A photo of {wanted}. ", "")


def test_the_end_of_a_template_can_be_kept_and_special_tokens_left_out(tmp_path: Path) -> None:
    text = (add_t5_tokenizer(tmp_path) / "tokenizer.json").read_bytes()
    fields = {"template": "a fox {}</s>", "special_tokens": False, "max_length": 6}
    whole, kept = (Tokenizing(text, spec(text, keep_end=keep, **fields)) for keep in (False, True))
    [short, long] = whole.tokens(["in rain", "in " * 9])
    [same, cut] = kept.tokens(["in rain", "in " * 9])
    assert (same.ids.tolist(), same.length) == (short.ids.tolist(), short.length)
    assert cut.length == long.length
    assert cut.ids.tolist() == [*long.ids[:5], 1]
    with pytest.raises(UsageError, match="--max-length 1: expected more than the 1 tokens"):
        Tokenizing(text, spec(text, **{**fields, "max_length": 1}, keep_end=True))


def test_the_tokenizer_of_byt5_has_no_files_and_gives_the_same_ids(tmp_path: Path) -> None:
    theirs = ByT5Tokenizer()
    theirs.save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    facts = find_tokenizer(tmp_path)
    assert (facts.padding_id, facts.padding_side, facts.last_id) == (0, "right", len(theirs) - 1)
    texts = ["", 'Text "Hello wörld". ', "你好 🙂", "a <extra_id_3> b </s> c", " x\n\ty "]
    found = Tokenizing(facts.text, spec(facts.text, max_length=64)).tokens(texts)
    assert [one.ids.tolist() for one in found] == theirs(texts)["input_ids"]


@pytest.mark.parametrize("template", ["", "a photo", "{} and {}", "{0}", "{ }"])
def test_a_template_has_one_place(tmp_path: Path, template: str) -> None:
    text = (add_t5_tokenizer(tmp_path) / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match=r"--template .*: expected one \{\}, got"):
        Tokenizing(text, spec(text, template=template))
