"""Token ids are those of transformers' own tokenizers; digests tell tokenizers apart."""

import contextlib
import json
import random
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cache_fixtures import add_clip_tokenizer, add_t5_tokenizer, captions
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from enginecast.cache.encoders.tokenizer_files import find_tokenizer
from enginecast.cache.encoders.tokenizing import Tokenizing, clean_text, digest_of, prepare_text
from enginecast.cache.store.spec import Clean, EncoderSpec, OutputSpec
from enginecast.capture.sources.base.padding_side import PADS_LEFT
from enginecast.errors import CacheError, EnginecastError, SourceError, UsageError

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


def test_ids_are_those_of_t5_s_own_class(tmp_path: Path) -> None:
    """transformers builds it anew from the vocabulary, instead of reading the whole file."""
    file = add_t5_tokenizer(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": None}))
    configure(tmp_path, tokenizer_class="T5Tokenizer", extra_ids=0)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert type(theirs).__name__ == "T5Tokenizer"
    facts, texts = find_tokenizer(tmp_path), random_texts(200)
    found = Tokenizing(facts.text, spec(facts.text)).tokens(texts)
    wanted = theirs(texts, truncation=True, max_length=20)["input_ids"]
    assert [one.ids.tolist() for one in found] == wanted
    assert facts.padding_id == theirs.pad_token_id


def test_a_tokenizer_that_was_used_is_the_same(tmp_path: Path) -> None:
    """Fast tokenizers write padding and truncation of their last call into the file."""
    file = add_t5_tokenizer(tmp_path) / "tokenizer.json"
    digest, tokens = digest_of(file.read_bytes()), texts_to_ids(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    theirs(["a", "a fox"], padding="max_length", truncation=True, max_length=5)
    theirs.backend_tokenizer.save(str(file))
    assert json.loads(file.read_text())["truncation"]["max_length"] == 5
    assert digest_of(file.read_bytes()) == digest
    assert texts_to_ids(tmp_path) == tokens
    content = json.loads(file.read_text())
    for text in (json.dumps(content, indent=3), json.dumps(dict(reversed(content.items())))):
        assert digest_of(text.encode()) == digest
    content["truncation"]["direction"] = "Left"  # which ids a long text keeps
    assert digest_of(json.dumps(content).encode()) != digest


def texts_to_ids(folder: Path) -> list[list[int]]:
    facts = find_tokenizer(folder)
    tokenizing = Tokenizing(facts.text, spec(facts.text))
    return [one.ids.tolist() for one in tokenizing.tokens(captions(20))]


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


def test_other_merges_have_another_digest(tmp_path: Path) -> None:
    text = (add_clip_tokenizer(tmp_path) / "tokenizer.json").read_bytes()
    content = json.loads(text)
    content["model"]["merges"].pop()
    assert digest_of(json.dumps(content).encode()) != digest_of(text)


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[]", b'{"model": {}}'])
def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(CacheError, match="not a tokenizer"):
        Tokenizing(text, spec(b"{}", tokenizer=digest_of(text) if b"model" in text else "ab"))
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(SourceError, match=rf"{re.escape(str(tmp_path))}.*not a tokenizer"):
        find_tokenizer(tmp_path)


def test_another_tokenizer_than_the_spec_s_is_refused(tmp_path: Path) -> None:
    text = (add_t5_tokenizer(tmp_path) / "tokenizer.json").read_bytes()
    with pytest.raises(CacheError, match="expected the tokenizer ab, got"):
        Tokenizing(text, spec(text, tokenizer="ab"))


def test_the_longest_text_holds_more_than_what_is_added(tmp_path: Path) -> None:
    text = (add_clip_tokenizer(tmp_path) / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match="--max-length 2: expected more than the 2 tokens"):
        Tokenizing(text, spec(text, max_length=2))
    cut = Tokenizing(text, spec(text, max_length=3)).tokens(["a red fox"])[0]
    assert (len(cut.ids), cut.length > 4) == (3, True)


CLEANED: list[tuple[Clean, str, str]] = [
    ("none", "  A Fox\n", "  A Fox\n"),
    ("strip", "  A Fox\n", "A Fox"),
    ("lower-strip", "  A Föx\n", "a föx"),
    ("whitespace", " A \n\t Fox &amp;amp;  co ", "A Fox & co"),
]


@pytest.mark.parametrize(("how", "text", "wanted"), CLEANED)
def test_cleaning_goes_before_the_template(how: Clean, text: str, wanted: str) -> None:
    assert clean_text(how, text) == wanted
    made = spec(b"{}", clean=how, template="A photo of {}. ")
    assert prepare_text(made, text) == f"A photo of {wanted}. "


def test_cleanings_are_those_of_diffusers() -> None:
    from diffusers.pipelines.pixart_alpha import PixArtSigmaPipeline
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean
    from diffusers.utils import is_ftfy_available

    texts = [*random_texts(100), "&lt;b&gt; &amp;lt; x", "\u00a0 İstanbul ẞ \u2003"]
    lower = PixArtSigmaPipeline.__new__(PixArtSigmaPipeline)._text_preprocessing(texts)
    assert lower == [clean_text("lower-strip", text) for text in texts]
    if is_ftfy_available():
        pytest.skip("ftfy is installed, which repairs texts first")
    assert [*map(prompt_clean, texts)] == [clean_text("whitespace", text) for text in texts]


@pytest.mark.parametrize("template", ["", "a photo", "{} and {}", "{0}", "{ }"])
def test_a_template_has_one_place(tmp_path: Path, template: str) -> None:
    text = (add_t5_tokenizer(tmp_path) / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match=r"--template .*: expected one \{\}, got"):
        Tokenizing(text, spec(text, template=template))


def test_padding_comes_from_the_tokenizer_s_files(tmp_path: Path) -> None:
    """Stable Diffusion XL: the first tokenizer pads with its end, the second with "!"."""
    folder = add_clip_tokenizer(tmp_path)
    known = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id
    assert find_tokenizer(folder).padding_id == known("<|endoftext|>")
    configure(folder, pad_token={"content": "!", "lstrip": False})
    assert find_tokenizer(folder).padding_id == known("!")
    configure(folder, pad_token="")
    assert find_tokenizer(folder).padding_id is None
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<|endoftext|>"}')
    assert find_tokenizer(folder).padding_id == known("<|endoftext|>")
    configure(folder, pad_token="<lost>")
    with pytest.raises(UsageError, match="its padding token '<lost>' is not in its vocabulary"):
        find_tokenizer(folder)


def test_padding_comes_from_the_tokenizer_itself_where_no_file_says(tmp_path: Path) -> None:
    file = add_t5_tokenizer(tmp_path) / "tokenizer.json"
    (tmp_path / "tokenizer_config.json").unlink()
    bare = find_tokenizer(tmp_path)
    assert (bare.padding_id, bare.padding_side, bare.max_length) == (None, None, None)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_padding(direction="left", pad_id=2, pad_token="<unk>")
    tokenizer.save(str(file))
    found = find_tokenizer(tmp_path)
    assert (found.padding_id, found.padding_side) == (2, "left")


def test_which_tokenizers_pad_on_the_left() -> None:
    """The table against the classes of the installed transformers."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    left = set()
    for name in {*TOKENIZER_MAPPING_NAMES.values()} - {None}:
        with contextlib.suppress(ImportError):  # a stand-in for one that needs sentencepiece
            if getattr(getattr(transformers, name), "padding_side", None) == "left":
                left.add(name)
    assert left == PADS_LEFT


def test_sides_and_lengths_of_the_config(tmp_path: Path) -> None:
    add_t5_tokenizer(tmp_path)
    assert find_tokenizer(tmp_path).padding_side == "right"
    configure(tmp_path, tokenizer_class="GemmaTokenizerFast", model_max_length=10**30)
    found = find_tokenizer(tmp_path)
    assert (found.padding_side, found.max_length) == ("left", None)


def test_where_a_tokenizer_is_looked_for(tmp_path: Path) -> None:
    for name in ("text_encoder_2", "tokenizer_2", "elsewhere"):
        (tmp_path / name).mkdir()
    encoder = tmp_path / "text_encoder_2"
    with pytest.raises(SourceError, match="text_encoder_2: expected a tokenizer") as error:
        find_tokenizer(encoder)
    assert "--tokenizer" in error.value.hint
    add_t5_tokenizer(tmp_path / "tokenizer_2")
    add_clip_tokenizer(tmp_path / "elsewhere")
    beside, asked = find_tokenizer(encoder), find_tokenizer(encoder, str(tmp_path / "elsewhere"))
    assert beside.text != asked.text
    assert find_tokenizer(encoder, str(tmp_path / "elsewhere" / "tokenizer.json")) == asked
    for wrong, message in ((tmp_path / "gone", "no such file"), (encoder, "expected tokenizer")):
        with pytest.raises(UsageError, match=f"--tokenizer .*: {message}"):
            find_tokenizer(encoder, str(wrong))


def test_files_of_an_older_format_are_converted(tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    (tmp_path / "new").mkdir()
    content = json.loads((add_clip_tokenizer(tmp_path / "new") / "tokenizer.json").read_text())
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    (old / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (old / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": 77})
    )
    facts = find_tokenizer(old)
    theirs = CLIPTokenizer.from_pretrained(old, local_files_only=True)
    texts = captions(50)
    found = Tokenizing(facts.text, spec(facts.text)).tokens(texts)
    wanted = theirs(texts, truncation=True, max_length=20)["input_ids"]
    assert [one.ids.tolist() for one in found] == wanted
    assert (facts.padding_id, facts.max_length) == (theirs.pad_token_id, 77)


def test_files_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(b"no model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    with pytest.raises(EnginecastError, match=f"{tmp_path}: the tokenizer has no tokenizer.json"):
        find_tokenizer(tmp_path)
