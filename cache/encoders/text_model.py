"""A text encoder as such: what it takes and gives, before anybody says how texts go into it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from enginecast.cache.store.spec import About, OutputSpec, Side
from enginecast.errors import UsageError
from enginecast.runtime.values.arrays import Array

_FROM = re.compile(r"hidden_states\.(\d+):")


@dataclass(frozen=True)
class ModelFacts:
    """What is known of an encoder; `identity`, `precision` and `engine` are as in its spec.

    Args:
        folder: of the bundle or model, where its tokenizer may be.
        takes_mask: whether it can be given a padding mask.
        sequence: fewest and most tokens that it takes; None: no limit.
        default_length: longest text where neither the user nor the tokenizer says.
        longest_text: tokens at which the model cuts texts, whatever its own tokenizer says; None:
            at none.
        vocabulary: how many ids it knows; None: not known.
        padding_id, padding_side: where the tokenizer does not say; None: not known.
    """

    about: About
    folder: Path
    identity: Mapping[str, str]
    precision: str
    takes_mask: bool
    sequence: tuple[int, int | None]
    default_length: int
    vocabulary: int | None
    padding_id: int | None
    padding_side: Side = "right"
    longest_text: int | None = None
    engine: Mapping[str, str] = field(default_factory=dict)


class TextModel(Protocol):
    """A text encoder, run as an engine or eagerly."""

    facts: ModelFacts

    def outputs(self, names: Sequence[str]) -> tuple[OutputSpec, ...]:
        """The outputs of these names as the encoder gives them; of none the default ones."""
        ...

    def run(self, ids: Array, mask: Array | None, outputs: Sequence[str]) -> dict[str, Array]:
        """Outputs by name: [batch, sequence, width] or [batch, width].

        Args:
            ids: int64 [batch, sequence].
            mask: int64 [batch, sequence], 1 for tokens; None: the encoder gets none.
        """
        ...

    def close(self) -> None: ...


def named_outputs(names: Sequence[str], layers: int | None) -> tuple[str, ...]:
    """Names of outputs with `hidden_states.N:` spelled out: all hidden states from N on.

    Args:
        layers: of the model, which has one hidden state more; None: not known.

    Raises:
        UsageError: they are asked for, and not known.
    """
    found: list[str] = []
    for name in names:
        first = _FROM.fullmatch(name)
        if first is None:
            found.append(name)
        elif layers is None:
            raise UsageError(
                f"--outputs {name}: nobody knows how many hidden states the model has",
                hint="Name each of them: --outputs hidden_states.0,hidden_states.1.",
            )
        else:
            found += [f"hidden_states.{index}" for index in range(int(first[1]), layers + 1)]
    return tuple(found)


def layers_in(config: Mapping[str, Any]) -> int | None:
    """How many layers the text model of a config.json has; None where it does not say."""
    found = {**config, **(config.get("text_config") or {})}.get("num_hidden_layers")
    return found if isinstance(found, int) else None


def stored_output(
    name: str, shape: Sequence[int | str], batch: Sequence[int | str], dtype: str, gives: str
) -> OutputSpec:
    """The spec of an output of token ids [*batch]; refuses one that cannot be stored."""
    rows: dict[tuple[int | str, ...], Literal["token", "text"]]
    rows = {tuple(batch): "token", (batch[0],): "text"}
    per, width = rows.get(tuple(shape[:-1])), shape[-1] if shape else None
    whole = tuple(shape) != tuple(batch) and "float" in dtype
    if per is None or not isinstance(width, int) or not whole:
        raise UsageError(
            f"--outputs {name}: expected floats [batch, sequence, width] or [batch, width], but "
            f"{gives} {dtype} {list(shape)}",
            hint="Name those to keep: --outputs A,B.",
        )
    kind: Any = dtype.removeprefix("torch.")
    return OutputSpec(name=name, per=per, width=width, dtype=kind)
