"""The map of precisions: for each block of a model, what its weights take in each precision."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from enginecast.verification.report.data import StoredWeights
from enginecast.verification.report.strip import block_of


@dataclass(frozen=True)
class Segment:
    """The weights of a block in one precision."""

    precision: str
    bytes: int
    share: float
    """Percent of the largest block; of the whole model, of all."""


@dataclass(frozen=True)
class BlockWeights:
    """A row of the map."""

    name: str
    bytes: int
    segments: Sequence[Segment]


def precision_map(stored: Sequence[StoredWeights]) -> tuple[BlockWeights, Sequence[BlockWeights]]:
    """The whole model, and its blocks in order; the precision of most bytes comes first."""
    blocks: dict[str, Counter[str]] = {}
    for each in stored:
        counts = blocks.setdefault(block_of(each.module) or "the model itself", Counter())
        counts[each.precision] += each.bytes
    whole = sum(blocks.values(), Counter[str]())
    most = max(counts.total() for counts in blocks.values()) or 1
    return (
        _row("the model", whole, whole.total() or 1),
        [_row(name, counts, most) for name, counts in blocks.items()],
    )


def _row(name: str, counts: Counter[str], most: int) -> BlockWeights:
    parts = [Segment(kind, count, 100 * count / most) for kind, count in counts.most_common()]
    return BlockWeights(name, counts.total(), parts)
