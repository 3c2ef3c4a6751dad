"""What fills a cache: a text encoder, run as an engine or eagerly."""

from typing import Protocol

from enginecast.cache.spec import About, EncoderSpec
from enginecast.runtime.arrays import Array


class Encoder(Protocol):
    """A text encoder with everything that decides its outputs."""

    @property
    def spec(self) -> EncoderSpec: ...

    @property
    def about(self) -> About: ...

    @property
    def tokenizer(self) -> bytes:
        """Text of the `tokenizer.json` that makes its token ids."""
        ...

    def encode(self, ids: Array, mask: Array) -> dict[str, Array]:
        """Run on a batch.

        Args:
            ids: int64 [batch, sequence], padded as the spec says.
            mask: int64 [batch, sequence], 1 for tokens; all ones where the spec has no mask.

        Returns:
            The spec's outputs in its dtypes: [batch, sequence, width], or [batch, width] for an
            output per text.  Values may be NaN or infinite: who stores them looks.
        """
        ...

    def close(self) -> None:
        """Give the memory back; twice does no harm."""
        ...
