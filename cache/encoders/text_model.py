"""A text encoder as such: what it takes and gives, before anybody says how texts go into it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from enginecast.cache.store.spec import About, OutputSpec
from enginecast.runtime.values.arrays import Array


@dataclass(frozen=True)
class ModelFacts:
    """What is known of an encoder.

    Args:
        about: class, source, config and verdict.
        folder: of the bundle or model, where its tokenizer may be.
        identity: digest of each part of the model.
        precision: what it computes in.
        takes_mask: whether it can be told what is padding.
        sequence: fewest and most tokens that it takes; None: no limit.
        default_length: longest text where neither the user nor the tokenizer says.
        vocabulary: how many ids it knows; None: not known.
        padding_id: where the tokenizer does not say; None: not known.
        padding_side: where the tokenizer does not say.
        engine: of an engine its target, pipeline and the digests of its files.
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
    padding_side: Literal["right", "left"] = "right"
    engine: Mapping[str, str] = field(default_factory=dict)


class TextModel(Protocol):
    """A text encoder, run as an engine or eagerly."""

    facts: ModelFacts

    def outputs(self, names: Sequence[str]) -> tuple[OutputSpec, ...]:
        """The outputs of these names as the encoder gives them; of none the default ones.

        Raises:
            UsageError: it does not give such an output, or one that has neither a row for each
                token nor one for the text.
        """
        ...

    def run(self, ids: Array, mask: Array | None, outputs: Sequence[str]) -> dict[str, Array]:
        """Run on a batch.

        Args:
            ids: int64 [batch, sequence].
            mask: int64 [batch, sequence], 1 for tokens; None: the encoder is not told.
            outputs: their names.

        Returns:
            By name [batch, sequence, width] or [batch, width], as `outputs` says.
        """
        ...

    def close(self) -> None: ...
