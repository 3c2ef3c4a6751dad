"""Follow a model's `generate` with an engine, token by token.  Needs neither torch nor the model.

At each step the engine has to choose the token that the model chose. It may choose another one only
at a tie: if the model's logits of both differ by less than the model's own error there in the
engine's dtype, times the limit of every verdict. The engine continues with the model's token in any
case, so that later steps are compared, too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginecast.errors import BundleError, EnginecastError, InputError, first_line
from enginecast.runtime.bundle.tensor_files import read_tensors, write_tensors
from enginecast.runtime.engine import Engine
from enginecast.runtime.generation import Decoder
from enginecast.runtime.values.arrays import Array
from enginecast.verification.floor import LIMIT, UNIT_ROUNDOFF

GENERATION_NAME = "generation.json"
ENCODED_NAME = "generation.safetensors"
"""File with the encoder's inputs, for a model that has an encoder."""
KEPT = 8
"""Number of tokens per step whose logits are stored: those that may tie with the best one."""
MOST_SHOWN = 4
"""Most steps that a verdict names."""
Numbers = NDArray[np.float64]
Ids = NDArray[np.int64]


class Continued(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts and a model's continuation of them."""

    prompts: list[list[int]]
    mask: list[list[int]]
    tokens: list[list[int]]
    """The generated tokens, [prompts, steps]."""
    best: list[list[list[int]]]
    """The tokens with the highest logits, [prompts, steps, `KEPT`], the highest first."""
    logits: list[list[list[float]]]
    """The logits of `best` in fp64."""
    slack: list[list[float]]
    """Largest difference of two logits that tie, [prompts, steps]."""


@dataclass(frozen=True)
class Followed:
    """The result of following `generate` with an engine."""

    logits: tuple[NDArray[np.float32], ...]
    """The logits of each step, [prompts, vocabulary]."""
    ties: int
    failures: tuple[str, ...]


def continued(
    ids: Ids, mask: Ids, tokens: Ids, exact: Numbers, plain: Numbers, dtype: str
) -> Continued:
    """The stored part of a model's run.

    Args:
        ids, mask: the prompts, both [prompts, tokens].
        tokens: the model's generated tokens, [prompts, steps].
        exact: logits in fp64, [prompts, steps, vocabulary].
        plain: the model's logits in the engine's dtype, of the same shape.
        dtype: the engine's dtype, such as "fp32".
    """
    lost = np.abs(plain - exact).max(-1)
    least = UNIT_ROUNDOFF[dtype] * np.abs(exact).max(-1)
    count = min(KEPT, exact.shape[-1])
    best = np.argsort(-exact, axis=-1, kind="stable")[..., :count]
    return Continued(
        prompts=ids.tolist(),
        mask=mask.tolist(),
        tokens=tokens.tolist(),
        best=best.tolist(),
        logits=np.take_along_axis(exact, best, -1).tolist(),
        slack=(2 * LIMIT * np.maximum(lost, least)).tolist(),
    )


def write_continued(
    folder: Path, found: Continued, encoded: Mapping[str, Array] | None = None
) -> None:
    """Write a stored run into a bundle.

    Args:
        encoded: the encoder's inputs, if the model has an encoder.
    """
    (folder / GENERATION_NAME).write_bytes(msgspec.json.encode(found) + b"\n")
    if encoded:
        write_tensors(folder / ENCODED_NAME, encoded)


def read_encoded(folder: Path) -> dict[str, Array]:
    """The encoder's inputs in that run; empty for a model without an encoder.

    Raises:
        BundleError: the file is damaged.
    """
    file = folder / ENCODED_NAME
    if not file.is_file():
        return {}
    try:
        return read_tensors(file)
    except InputError as error:
        raise BundleError(f"{file}: not what an encoder read: {error.message}") from error


def read_continued(folder: Path) -> Continued:
    """Read the stored run of a bundle.

    Raises:
        BundleError: the file is missing or damaged.
    """
    file = folder / GENERATION_NAME
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Continued)
        shape = np.shape(found.tokens)
        whole = np.shape(found.prompts) == np.shape(found.mask) and shape == np.shape(found.slack)
        if not whole or np.shape(found.best)[:2] != shape:
            raise ValueError("its parts do not fit each other")
        if np.shape(found.best) != np.shape(found.logits):
            raise ValueError("its parts do not fit each other")
    except FileNotFoundError as error:
        raise BundleError(f"{file}: what the model generated is missing") from error
    except (OSError, ValueError, msgspec.MsgspecError, json.JSONDecodeError) as error:
        raise BundleError(f"{file}: not what a model generated: {error}") from error
    return found


def follow(
    engine: Engine,
    model: Continued,
    encoded: Mapping[str, Array] | None = None,
    encoder: Engine | None = None,
) -> Followed:
    """Generate with an engine, and compare with the model's tokens.

    Args:
        encoded: the inputs of its encoder.
        encoder: the encoder's engine; None: the one loaded with the engine.
    """
    tokens = np.array(model.tokens, np.int64)
    decoder, found, failures, ties = Decoder(engine, encoder), [], list[str](), 0
    try:
        if decoder.encoder is not None:
            decoder.encode(encoded or {})
        logits = decoder.start(np.array(model.prompts), np.array(model.mask))
        for step in range(tokens.shape[1]):
            found.append(logits)
            for row, token in enumerate(logits.argmax(-1).tolist()):
                wanted, slack = model.tokens[row][step], model.slack[row][step]
                if token == wanted:
                    continue
                place = f"step {step + 1}, prompt {row + 1}: token {token}"
                got = f"{place}, where the model generates {wanted}"
                known = dict(zip(model.best[row][step], model.logits[row][step], strict=True))
                if token not in known or wanted not in known:
                    failures.append(f"{got}: it is none of the model's {len(known)} best")
                    continue
                gap = abs(known[wanted] - known[token])
                if gap > slack:
                    apart = f"their logits are {gap:.2g} apart, and ties within {slack:.2g}"
                    failures.append(f"{got}: {apart}")
                else:
                    ties += 1
            if step + 1 < tokens.shape[1]:
                logits = decoder.step(tokens[:, step])
    except EnginecastError as error:
        failures.append(f"step {len(found) + 1}: {first_line(error)}")
    if len(failures) > MOST_SHOWN:
        more = len(failures) - MOST_SHOWN
        failures = [*failures[:MOST_SHOWN], f"and at {more} more places"]
    return Followed(tuple(found), ties, tuple(f"generating: {each}" for each in failures))
