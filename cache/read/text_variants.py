"""Texts that a trainer makes on the fly, listed beforehand: shuffled or dropped tags, no caption.

    plan = Variants(count=4, shuffle_tags=True, keep_first=1, dropout=0.1, seed=7)
    fill_list = [text for caption in captions for text in plan.of(caption)]   # for `cache fill`
    text = plan.choose(caption, epoch=epoch, index=index)                      # when training

Whatever `choose` gives is in what `of` gave.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from enginecast.errors import UsageError

_TRIES = 8
"""Draws for each variant that is wanted: few tags have few orders."""


@dataclass(frozen=True)
class Variants:
    """How texts vary.

    Args:
        count: variants of a text at most, itself among them; fewer where there are not so many.
        shuffle_tags: put the tags in another order.
        tag_dropout: leave each tag out with this probability.
        keep_first: so many tags stay where they are, and are never left out.
        separator: between tags.
        dropout: the probability that `choose` gives the empty text: caption dropout.
        seed: other seeds, other variants.

    Raises:
        UsageError: a value that does not fit.

    Examples:
        >>> from enginecast.cache import Variants
        >>> plan = Variants(count=2, shuffle_tags=True, keep_first=1)
        >>> plan.choose("fox, red, snow", epoch=0, index=5) in plan.of("fox, red, snow")
        True
    """

    count: int = 1
    shuffle_tags: bool = False
    tag_dropout: float = 0.0
    keep_first: int = 0
    separator: str = ","
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"count: expected at least 1, got {self.count}")
        if self.keep_first < 0:
            raise UsageError(f"keep_first: expected at least 0, got {self.keep_first}")
        if not self.separator:
            raise UsageError("separator: expected what is between tags, got an empty text")
        for name in ("dropout", "tag_dropout"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise UsageError(f"{name}: expected 0 <= {name} < 1, got {value}")
        if self.count > 1 and not self.shuffle_tags and not self.tag_dropout:
            raise UsageError("count: texts do not vary without shuffle_tags or tag_dropout")

    def of(self, text: str) -> list[str]:
        """What to fill of a text: its variants, each once, and the empty text if it is dropped.

        Args:
            text: a caption, or tags with separators between them.
        """
        found = self._varied(text)
        return list(dict.fromkeys([*found, ""])) if self.dropout else found

    def choose(self, text: str, *, epoch: int, index: int) -> str:
        """The variant to train on: the same for the same seed, epoch and index, in any process.

        Args:
            text: the same that `of` was given.
            epoch: number of the epoch.
            index: of the item in its dataset.
        """
        random = _random(self.seed, "choose", text, epoch, index)
        if random.random() < self.dropout:
            return ""
        found = self._varied(text)
        return found[int(random.integers(len(found)))]

    def _varied(self, text: str) -> list[str]:
        found = {text: None}
        tags = [tag.strip() for tag in text.split(self.separator)]
        joint = self.separator if self.separator.isspace() else f"{self.separator.rstrip()} "
        for number in range(_TRIES * (self.count - 1)):
            if len(found) == self.count:
                break
            random = _random(self.seed, "draw", text, number)
            rest = [tag for tag in tags[self.keep_first :] if random.random() >= self.tag_dropout]
            if self.shuffle_tags:
                rest = [rest[position] for position in random.permutation(len(rest))]
            found[joint.join([*tags[: self.keep_first], *rest])] = None
        return list(found)


def _random(*parts: object) -> np.random.Generator:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
