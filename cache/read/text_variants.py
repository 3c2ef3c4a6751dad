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
    """Variants of a caption, for augmentation.

    Args:
        count: at most so many variants of a text, including itself.
        shuffle_tags: shuffle the tags.
        tag_dropout: leave out each tag with this probability.
        keep_first: keep so many tags in place.
        separator: what is between tags.
        dropout: caption dropout: the probability that `choose` returns the empty text.
        seed: other seeds give other variants.

    Raises:
        UsageError: a value is out of range.

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
        """List what to fill for a text: its variants, and the empty text if there is dropout.

        Args:
            text: a caption, or tags with separators between them.
        """
        found = self._varied(text)
        return list(dict.fromkeys([*found, ""])) if self.dropout else found

    def choose(self, text: str, *, epoch: int, index: int) -> str:
        """Choose the variant to train on: the same for a seed, epoch and index in any process.

        Args:
            text: the text that `of` was given.
            epoch: the epoch's number.
            index: the item's index in its dataset.
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
