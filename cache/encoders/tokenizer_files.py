"""The tokenizer of an encoder, and what its files say of padding and the longest text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from enginecast.cache.encoders.tokenizing import parse_tokenizer
from enginecast.cache.store.spec import Side
from enginecast.capture.sources.base.padding_side import FROM_THE_LEFT, cuts_left, padding_side
from enginecast.capture.sources.huggingface.text_encoders import beside
from enginecast.errors import CacheError, MissingError, SourceError, UsageError, first_line

FILE = "tokenizer.json"
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_OLDER = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
_NO_LIMIT = 10**6
"""transformers writes 10^30 where a tokenizer knows no longest text."""


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer, and what its files say; None where they do not.

    Args:
        text: of its `tokenizer.json`, without padding; truncation is there if it goes from the
            left.
        last_id: the greatest that it gives.
        padding_id, padding_side: what fills up a row, and where.
        max_length: longest text in tokens.
    """

    text: bytes
    last_id: int
    padding_id: int | None
    padding_side: Side | None
    max_length: int | None


def find_tokenizer(folder: Path, asked: str | None = None) -> TokenizerFacts:
    """Read the tokenizer of a model.

    Padding is what the tokenizer's own files say, not the model's config: CLIP's config knows 1,
    and its tokenizer pads with its end token; the second one of Stable Diffusion XL with "!".

    Args:
        folder: of the model or bundle.  Where it has no tokenizer and is called `text_encoder_2`,
            `tokenizer_2` beside it is taken, or `processor`, which is how pipelines of diffusers
            are saved.
        asked: a folder or a `tokenizer.json` that is to be taken instead.

    Raises:
        UsageError: `asked` is neither, or a padding token that is not in the vocabulary.
        SourceError: there is no tokenizer, or it cannot be read.
        MissingError: a package is lacking that reads the tokenizer's old format.
    """
    file = _place(folder, asked)
    if file.is_file():
        content, said = _read(file), dict[str, Any]()
        for path in (file.parent / name for name in _CONFIGS):
            if path.is_file():  # that of the first file first
                said = {**_read(path), **said}
    else:
        content, said = _convert(file.parent)
    try:
        tokenizer = parse_tokenizer(json.dumps(content).encode())
    except CacheError as error:
        raise SourceError(f"{file}: {error.message.removeprefix('tokenizer.json: ')}") from error
    left, limit = cuts_left(said, content), said.get("model_max_length", 0)
    limited = isinstance(limit, int | float) and 0 < limit < _NO_LIMIT
    kept = {**content, "padding": None, "truncation": FROM_THE_LEFT if left else None}
    return TokenizerFacts(
        text=json.dumps(kept, ensure_ascii=False, indent=1).encode(),
        last_id=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0),
        padding_id=_padding_id(file, said, content.get("padding") or {}, tokenizer),
        padding_side=padding_side(said, content),
        max_length=int(limit) if limited else None,
    )


def _place(folder: Path, asked: str | None) -> Path:
    """Where `tokenizer.json` is, or would be among the files of an older format."""
    if asked is not None:
        path = Path(asked)
        if not path.exists():
            raise UsageError(f"--tokenizer {asked}: no such file or folder")
        if path.is_file():
            return path
        if not _has_tokenizer(path):
            raise UsageError(f"--tokenizer {asked}: expected {FILE} in this folder, got none")
        return path / FILE
    for place in (folder, *beside(folder)):
        if _has_tokenizer(place):
            return place / FILE
    raise SourceError(
        f"{folder}: expected a tokenizer ({FILE}), got none",
        hint="Give the folder that has it: --tokenizer PATH.",
    )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (FILE, *_OLDER)) or _reads_bytes(folder)


def _reads_bytes(folder: Path) -> bool:
    """Whether it is ByT5's, which has no vocabulary to store."""
    config = folder / _CONFIGS[0]
    return config.is_file() and _read(config).get("tokenizer_class") == "ByT5Tokenizer"


def _of_bytes(read: Any) -> str:
    """The `tokenizer.json` of ByT5's tokenizer: a token for each byte (arXiv 2105.13626)."""
    # The letters of GPT-2's bytes: printable ones are themselves, others follow behind 255.
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = [byte for byte in range(256) if byte not in printed]
    letters = {
        byte: chr(byte if byte in printed else 256 + rest.index(byte)) for byte in range(256)
    }
    special = {token.content: number for number, token in read.added_tokens_decoder.items()}
    vocabulary = {letters[byte]: byte + read.offset for byte in range(256)}
    made = Tokenizer(BPE(vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    content = json.loads(made.to_str())
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    content["added_tokens"] = [
        {"id": number, **{flag: getattr(token, flag) for flag in flags}}
        for number, token in sorted(read.added_tokens_decoder.items())
    ]
    content["model"]["vocab"] |= special
    made = Tokenizer.from_str(json.dumps(content))
    end = read.eos_token
    made.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, special[end])]
    )
    return str(made.to_str())


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise SourceError(f"{file}: not a tokenizer: {error}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{file}: not a tokenizer: expected a JSON object")
    return content


def _convert(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `tokenizer.json` and `tokenizer_config.json` would say of files of an older format.

    They are read with transformers, which imports torch where it is there.
    """
    from transformers import AutoTokenizer

    try:
        read = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_fast=True
        )
        text = _of_bytes(read) if _reads_bytes(folder) else read.backend_tokenizer.to_str()
        content = json.loads(text)
    except ImportError as error:
        raise MissingError(
            f"{folder}: the tokenizer has no {FILE}, and the package that reads its own format"
            f" is missing: {first_line(error)}",
            hint="pip install sentencepiece, or save the tokenizer with save_pretrained.",
        ) from error
    except Exception as error:  # any kind: it depends on the tokenizer
        raise SourceError(
            f"{folder}: the tokenizer has no {FILE}, and cannot be converted: {first_line(error)}",
            hint="Save it with save_pretrained of a fast tokenizer.",
        ) from error
    assert isinstance(content, dict)
    names = ("pad_token", "padding_side", "truncation_side", "model_max_length")
    return content, {name: getattr(read, name) for name in names}


def _padding_id(
    file: Path, said: Mapping[str, Any], own: Mapping[str, Any], tokenizer: Tokenizer
) -> int | None:
    named = said.get("pad_token")
    token = named.get("content") if isinstance(named, dict) else named
    if not isinstance(token, str):
        found = own.get("pad_id")
        return found if isinstance(found, int) else None
    number = tokenizer.token_to_id(token)
    if number is None:
        raise UsageError(f"{file}: its padding token {token!r} is not in its vocabulary")
    return int(number)
