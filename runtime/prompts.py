"""Prompts to token ids, with the `tokenizers` library alone: transformers would import torch."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Encoding, Tokenizer

from enginecast.errors import BundleError, InputError
from enginecast.runtime.bundle.manifest import Manifest
from enginecast.runtime.values.arrays import Array

TOKENIZER_NAME = "tokenizer.json"
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


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """Read prompts from a text file: UTF-8, one a line, an empty line is the empty prompt.

    Raises:
        InputError: names the file, and the line that is not UTF-8.
    """
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


def encode_prompts(folder: Path, manifest: Manifest, prompts: Sequence[str]) -> PromptBatches:
    """Make the feeds of an engine from prompts.

    Args:
        folder: the bundle's folder, which holds `tokenizer.json`.
        manifest: its manifest; `text` has the padding id and the longest prompt.
        prompts: any number; more than the largest batch become several batches.

    Returns:
        int64 arrays [batch, sequence] for those of token ids, attention mask and token types
        that the engine takes.

    Raises:
        InputError: the engine takes other inputs than text, or not this many prompts.
        BundleError: the tokenizer is missing or damaged.
    """
    if not prompts:
        raise InputError("prompts: expected at least one, got none")
    text = manifest.text
    if text is None:
        raise InputError(
            f"{folder}: expected a bundle of a text model, but it has no tokenizer",
            hint="Feed tensors instead: --inputs FILE.safetensors.",
        )
    batch, sequence = _limits(manifest)
    longest = min(text.max_length, sequence[1])
    step = max(
        manifest.steps.get(str(size), 1) for spec in manifest.inputs for size in spec.shape[1:]
    )
    encodings = open_tokenizer(folder / TOKENIZER_NAME, longest).encode_batch(list(prompts))
    batches = []
    for chunk in _split(encodings, batch):
        least = sequence[0]
        arrays = pad(chunk, text.padding_id, least=least, step=step, side=text.padding_side)
        batches.append({spec.name: arrays[spec.kind] for spec in manifest.inputs})
    return PromptBatches(
        batches=tuple(batches),
        lengths=tuple(len(encoding.ids) for encoding in encodings),
        truncated=sum(bool(encoding.overflowing) for encoding in encodings),
    )


def _limits(manifest: Manifest) -> list[tuple[int, int]]:
    """Batch and sequence sizes that the token ids' shape allows."""
    for spec in manifest.inputs:
        if spec.kind not in _TEXT_KINDS or spec.dtype != "int64" or len(spec.shape) != 2:
            raise InputError(
                f"input {spec.name!r}: expected int64 token ids, mask or types [batch, sequence], "
                f"got {spec.kind} {spec.dtype} {list(spec.shape)}",
                hint="Feed tensors instead: --inputs FILE.safetensors.",
            )
    ids = next((spec for spec in manifest.inputs if spec.kind == "token_ids"), None)
    if ids is None:
        raise InputError("prompts: expected an engine that takes token ids, got none among inputs")
    return [manifest.symbols[size] if isinstance(size, str) else (size, size) for size in ids.shape]


def open_tokenizer(path: Path, longest: int) -> Tokenizer:
    """Open a `tokenizer.json`; it cuts texts at `longest` tokens and leaves padding to `pad`.

    Raises:
        BundleError: the file is missing or damaged.
    """
    if not path.is_file():
        raise BundleError(f"{path.parent}: expected {path.name}, but there is none")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise BundleError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_padding()  # the file may ask for its own padding and truncation
    tokenizer.enable_truncation(longest)
    return tokenizer


def _split(encodings: list[Encoding], sizes: tuple[int, int]) -> list[list[Encoding]]:
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


def pad(
    encodings: Sequence[Encoding],
    padding_id: int,
    *,
    least: int = 1,
    step: int = 1,
    side: Literal["right", "left"] = "right",
) -> dict[str, Array]:
    """Token ids, attention mask and token types of some texts, padded to the longest.

    Args:
        encodings: one or more, without padding of their own.
        padding_id: fills up the token ids.
        least: tokens that a row has at least.
        step: the number of tokens is a multiple of it.
        side: where the padding goes.

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
