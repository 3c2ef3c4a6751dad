"""Inputs that the user gives: `--inputs FILE.safetensors` and `--prompts FILE.txt`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from enginecast.capture.inputs import InputSpec
from enginecast.capture.source import Source
from enginecast.errors import UsageError


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


def read_prompts(path: Path) -> list[str]:
    """One prompt a line; an empty line is the empty prompt.

    Raises:
        UsageError: the file is missing, no UTF-8, or empty.
    """
    try:
        prompts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path} cannot be read: {error}") from error
    if not prompts:
        raise UsageError(f"--prompts {path} is empty", hint="Write one prompt a line.")
    return prompts


def tokenize(
    prompts: Sequence[str], source: Source, specs: Sequence[InputSpec]
) -> dict[str, Tensor]:
    """Token ids and mask of `prompts`, padded on the right, cut at the longest sequence allowed.

    Returns:
        A tensor [prompts, tokens] for each of token ids, attention mask and token types in `specs`.

    Raises:
        UsageError: the model has no tokenizer.json or takes no token ids.
    """
    file = next((file for file in source.tokenizer_files if file.name == "tokenizer.json"), None)
    ids = next((spec for spec in specs if spec.kind == "token_ids"), None)
    if file is None or ids is None:
        lack = "tokenizer.json" if file is None else "input of token ids"
        raise UsageError(
            f"--prompts does not fit {source.name}: it has no {lack}",
            hint="Give the inputs as tensors: --inputs FILE.safetensors.",
        )
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()  # tokenizer.json may carry a fixed length of its own
    sequence = ids.dims[-1]
    tokenizer.enable_truncation(sequence.maximum)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
    length = max(sequence.minimum, *(len(row) for row in rows), 1)
    values = torch.full((len(rows), length), ids.padding or 0)
    mask = torch.zeros_like(values)
    for index, row in enumerate(rows):
        values[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        mask[index, : len(row)] = 1
    by_kind = {"token_ids": values, "attention_mask": mask, "token_type_ids": mask * 0}
    return {spec.name: by_kind[spec.kind].to(spec.dtype) for spec in specs if spec.kind in by_kind}
