"""Inputs that the user gives: `--inputs FILE.safetensors` and `--prompts FILE.txt`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.sources.source import Source
from enginecast.errors import BundleError, InputError, SourceError, UsageError
from enginecast.runtime.prompts import open_tokenizer, pad, read_prompts


def read_inputs(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file that holds one tensor per input, by argument name.

    Raises:
        UsageError: the file is missing, broken or empty.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--inputs {path} cannot be read as safetensors: {error}") from error
    if not tensors:
        raise UsageError(f"--inputs {path} holds no tensor")
    return tensors


def check_arguments(names: Iterable[str], source: Source, origin: str) -> None:
    """Raise UsageError when an input is none of the arguments of the model's `forward`."""
    unknown = sorted(set(names) - set(source.forward_arguments))
    if unknown:
        raise UsageError(
            f"{origin}: {source.name} takes no input {unknown[0]!r}",
            hint=f"It takes {', '.join(source.forward_arguments)}.",
        )


def given_prompts(path: Path) -> list[str]:
    """One prompt a line, read as `enginecast run` reads them.

    Raises:
        UsageError: the file is missing, no UTF-8, or empty.
    """
    try:
        return read_prompts(path)
    except InputError as error:
        raise UsageError(
            f"--prompts {error.message}", hint="Write one prompt a line, in UTF-8."
        ) from error


def tokenize(
    prompts: Sequence[str], source: Source, specs: Sequence[InputSpec]
) -> dict[str, Tensor]:
    """Token ids and mask of `prompts`, padded on the right, cut at the longest sequence allowed.

    Returns:
        A tensor [prompts, tokens] for each of token ids, attention mask and token types in `specs`.

    Raises:
        UsageError: the model has no tokenizer.json or takes no token ids.
        SourceError: tokenizer.json is damaged.
    """
    file = next((file for file in source.tokenizer_files if file.name == "tokenizer.json"), None)
    ids = next((spec for spec in specs if spec.kind == "token_ids"), None)
    if file is None or ids is None:
        lack = "tokenizer.json" if file is None else "input of token ids"
        raise UsageError(
            f"--prompts does not fit {source.name}: it has no {lack}",
            hint="Give the inputs as tensors: --inputs FILE.safetensors.",
        )
    sequence = ids.dims[-1]
    try:
        tokenizer = open_tokenizer(file, sequence.maximum)
    except BundleError as error:
        raise SourceError(error.message) from error
    arrays = pad(tokenizer.encode_batch(list(prompts)), ids.padding or 0, least=sequence.minimum)
    return {
        spec.name: torch.from_numpy(arrays[spec.kind]).to(spec.dtype)
        for spec in specs
        if spec.kind in arrays
    }
