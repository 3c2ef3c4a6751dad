"""Convert prompts to token ids, only with the `tokenizers` library: transformers would import
torch.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer

from enginecast.errors import BundleError, EnginecastError, InputError
from enginecast.runtime.bundle.manifest import TOKENIZER_NAME as TOKENIZER_NAME
from enginecast.runtime.bundle.manifest import Input, Manifest, TextForm
from enginecast.runtime.text_form import prepare_text
from enginecast.runtime.values.arrays import Array

_Row = TypeVar("_Row")
_TEXT_KINDS = ("token_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class PromptBatches:
    """Prompts as feeds for an engine.

    Args:
        batches: feeds in the order of the prompts; each is padded to its own longest prompt.
        lengths: tokens of each prompt, before padding.
        truncated: how many prompts were cut to the longest the model takes.
    """

    batches: tuple[dict[str, Array], ...]
    lengths: tuple[int, ...]
    truncated: int


@dataclass(frozen=True)
class TextRules:
    """Rules for turning texts into inputs; examples/triton_server writes them for another server.

    Args:
        padding_id, padding_side: what fills up the token ids, and where.
        longest: tokens at which a text is cut.
        least_tokens, step: tokens that a row has at least, and what they are a multiple of.
        least_texts, most_texts: of a batch.
    """

    padding_id: int
    padding_side: Literal["right", "left"]
    longest: int
    least_tokens: int
    step: int
    least_texts: int
    most_texts: int


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """Read prompts from a text file: UTF-8, one a line, an empty line is the empty prompt."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if not data:
        raise InputError(f"{path}: expected one prompt a line, got an empty file")
    lines = data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            prompts.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise InputError(f"{path}:{number}: expected UTF-8: {error}") from error
    return prompts


class PromptEncoder:
    """Makes the feeds of an engine from prompts; several threads may share one.

    Args:
        folder: the bundle's folder, for messages.
        manifest: its manifest; `text` has the padding id and the longest prompt.
        tokenizer: the bytes of its `tokenizer.json`; None: they are read now.

    Raises:
        InputError: the engine takes other inputs than text.
        BundleError: the tokenizer is missing or damaged.
    """

    def __init__(self, folder: Path, manifest: Manifest, tokenizer: bytes | None = None) -> None:
        if manifest.text is None:
            raise InputError(
                f"{folder}: expected a bundle of a text model, but it has no tokenizer",
                hint="Feed tensors instead: --inputs FILE.safetensors.",
            )
        self._manifest, self._text = manifest, manifest.text
        for spec in manifest.inputs:
            if spec.kind not in _TEXT_KINDS or spec.dtype != "int64" or len(spec.shape) != 2:
                raise InputError(
                    f"input {spec.name!r}: expected int64 token ids, mask or types [batch,"
                    f" sequence], got {spec.kind} {spec.dtype} {list(spec.shape)}",
                    hint="Feed tensors instead: --inputs FILE.safetensors.",
                )
        ids = next((spec for spec in manifest.inputs if spec.kind == "token_ids"), None)
        if ids is None:
            what = "expected an engine that takes token ids, got none among inputs"
            raise InputError(f"prompts: {what}")
        self._batch, self._tokens = sizes_of(manifest, ids)
        self._step = max(
            manifest.steps.get(str(size), 1) for spec in manifest.inputs for size in spec.shape[1:]
        )
        self._path = folder / TOKENIZER_NAME
        longest = self.rules.longest
        self._tokenizer = open_tokenizer(self._path, longest, tokenizer, form=self._text)

    @property
    def rules(self) -> TextRules:
        """What decides how texts become feeds."""
        return TextRules(
            padding_id=self._text.padding_id,
            padding_side=self._text.padding_side,
            longest=min(self._text.max_length, self._tokens[1]),
            least_tokens=self._tokens[0],
            step=self._step,
            least_texts=self._batch[0],
            most_texts=self._batch[1],
        )

    def __call__(self, prompts: Sequence[str]) -> PromptBatches:
        """Make feeds of prompts; more than the largest batch become several batches.

        Returns:
            int64 arrays [batch, sequence] for those of token ids, attention mask and token types
            that the engine takes.

        Raises:
            InputError: the engine does not take this many prompts, or one is not a text.
        """
        prompts = require_texts(prompts)
        with refusing(f"{self._path}: cannot tokenize"):
            encodings = tokenize(self._tokenizer, self._text, prompts)
        batches = []
        for chunk in split(encodings, self._batch):
            arrays = pad(
                chunk,
                self._text.padding_id,
                least=self._tokens[0],
                step=self._step,
                side=self._text.padding_side,
            )
            batches.append({spec.name: arrays[spec.kind] for spec in self._manifest.inputs})
        return PromptBatches(
            batches=tuple(batches),
            lengths=tuple(len(encoding.ids) for encoding in encodings),
            truncated=sum(encoding.is_cut for encoding in encodings),
        )


def require_texts(prompts: str | Sequence[str]) -> list[str]:
    """Prompts that can be tokenized; an InputError for others, and for none at all."""
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts: expected a str or several, got {type(prompts).__name__}")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts:
        raise InputError("prompts: expected at least one, got none")
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise InputError(f"prompts[{place}]: expected a str, got {type(prompt).__name__}")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError(f"prompts[{place}]: expected text, got half a surrogate pair")
    return prompts


def sizes_of(manifest: Manifest, spec: Input) -> list[tuple[int, int]]:
    """The least and the largest size of each dimension of an input."""
    return [
        manifest.symbols[size] if isinstance(size, str) else (size, size) for size in spec.shape
    ]


def encode_prompts(folder: Path, manifest: Manifest, prompts: Sequence[str]) -> PromptBatches:
    """Make the feeds of an engine from prompts: see `PromptEncoder`."""
    return PromptEncoder(folder, manifest)(prompts)


PLAIN = TextForm()


class Tokens(NamedTuple):
    """A text as token ids."""

    ids: list[int]
    type_ids: list[int]
    is_cut: bool


def tokenize(tokenizer: Tokenizer, form: TextForm, texts: Sequence[str]) -> list[Tokens]:
    """Put texts into their form, and make ids of them; see `open_tokenizer`."""
    prepared = [prepare_text(form, text) for text in texts]
    added = form.special_tokens
    encodings = tokenizer.encode_batch([text for text, _ in prepared], add_special_tokens=added)
    ends = [tokenizer.encode(prepared[0][1], add_special_tokens=added)] if form.keep_end else []
    return [
        Tokens(
            [number for one in (encoding, *ends) for number in one.ids],
            [kind for one in (encoding, *ends) for kind in one.type_ids],
            bool(encoding.overflowing),
        )
        for encoding in encodings
    ]


def open_tokenizer(
    path: Path, longest: int, content: bytes | None = None, form: TextForm = PLAIN
) -> Tokenizer:
    """Open a `tokenizer.json`, whose content may have been read before; it cuts texts on the side
    that it says, so that they have `longest` tokens with what their form keeps behind them, and
    leaves padding to `pad`.
    """
    if content is None:
        if not path.is_file():
            raise BundleError(f"{path.parent}: expected {path.name}, but there is none")
        content = path.read_bytes()
    with refusing(f"{path}: not a tokenizer"):
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_padding()  # the file may ask for its own padding and length
        side = (tokenizer.truncation or {}).get("direction", "right")
        if form.keep_end:
            tokenizer.no_truncation()
            end = tokenizer.encode(
                prepare_text(form, "")[1], add_special_tokens=form.special_tokens
            )
            longest -= len(end)
        tokenizer.enable_truncation(longest, direction=side)
        return tokenizer


@contextmanager
def refusing(what: str, kind: type[EnginecastError] = BundleError) -> Iterator[None]:
    """Raise an error of ours for what the tokenizer library raises: plain exceptions, and for some
    files a panic of Rust, which is not even an Exception.
    """
    try:
        yield
    except Exception as error:  # the library has no class of its own
        raise kind(f"{what}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}") from error


def split(encodings: list[_Row], sizes: tuple[int, int]) -> list[list[_Row]]:
    """Split evenly (5 for at most 4 into 2 and 3), so that a least batch is rarely missed."""
    least, greatest = sizes
    count = -(-len(encodings) // greatest)
    bounds = [index * len(encodings) // count for index in range(count + 1)]
    if bounds[1] < least:
        raise InputError(
            f"prompts: expected batches of {least}..{greatest}, which {len(encodings)} do not fill",
            hint="Add prompts, or export with a smaller least batch.",
        )
    return [encodings[start:end] for start, end in pairwise(bounds)]


def require_rows(manifest: Manifest, count: int) -> None:
    """Refuse outputs that say something of a whole batch: several cannot be made one."""
    batch = next(spec.shape[0] for spec in manifest.inputs if spec.kind == "token_ids")
    for output in manifest.outputs:
        shape = ", ".join(map(str, output.shape))
        if output.shape[:1] != (batch,):
            raise InputError(
                f"output {output.name!r}: expected the batch as its first dimension, got"
                f" [{shape}], so the outputs of {count} batches cannot be joined",
                hint="Run fewer prompts at a time, so that they make one batch.",
            )


def join(parts: Sequence[Array]) -> Array:
    """Stack batches along dim 0; shorter sequences are filled up with zeros (padding rows)."""
    if len(parts) == 1:
        return parts[0]
    longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        widths = [(0, most - size) for most, size in zip(longest, part.shape[1:], strict=True)]
        padded.append(np.pad(part, [(0, 0), *widths]))
    return np.concatenate(padded)


def pad(
    encodings: Sequence[Tokens | Encoding],
    padding_id: int,
    *,
    least: int = 1,
    step: int = 1,
    side: Literal["right", "left"] = "right",
) -> dict[str, Array]:
    """Token ids, attention mask and token types of some texts, padded to the longest.

    Args:
        encodings: one or more, without padding of their own.
        least, step: tokens that a row has at least, and what their number is a multiple of.

    Returns:
        An int64 array [texts, tokens] for each kind of input.
    """
    width = max(least, *(len(encoding.ids) for encoding in encodings), 1)
    width += -width % step

    def rows(values: Iterable[list[int]], filling: int) -> Array:
        padded = []
        for row in values:
            rest = [filling] * (width - len(row))
            padded.append([*row, *rest] if side == "right" else [*rest, *row])
        return np.array(padded, dtype=np.int64)

    return {
        "token_ids": rows((encoding.ids for encoding in encodings), padding_id),
        "attention_mask": rows(([1] * len(encoding.ids) for encoding in encodings), 0),
        "token_type_ids": rows((encoding.type_ids for encoding in encodings), 0),
    }
