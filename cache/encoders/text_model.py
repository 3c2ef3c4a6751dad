"""A text encoder as such: what it takes and gives, before anybody says how texts go into it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from enginecast.cache.store.spec import About, OutputSpec, Side
from enginecast.errors import UsageError
from enginecast.runtime.bundle.manifest import TextForm
from enginecast.runtime.prompts import PLAIN
from enginecast.runtime.values.arrays import Array


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
        form: what texts are made before they are tokenized, where the user does not say.
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
    form: TextForm = PLAIN
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
