"""How the channels of a value lie in its dims, on the way from an attention back to its values."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How the channels of a value stand for those of what the linears read, [..., channels]."""

    kind: Literal["flat", "split", "heads"]
    """[..., heads * size], [..., heads, size] or [..., heads, tokens, size]."""
    heads: int
    size: int
    repeats: int = 1
    """Heads of what the linears read that come from each head of this value."""

    def spread(self, exponents: Tensor) -> Tensor:
        """The exponents of all channels as those of this value, to be broadcast to it."""
        own = exponents.view(self.heads, self.repeats, self.size)[:, 0]
        if self.kind == "flat":
            return own.reshape(-1)
        return own.unsqueeze(1) if self.kind == "heads" else own

    def tied(self, sizes: Tensor) -> Tensor:
        """The largest size over the channels that share a factor, for each channel."""
        groups = sizes.view(self.heads, self.repeats, self.size)
        return groups.amax(1, keepdim=True).expand_as(groups).reshape(-1)
