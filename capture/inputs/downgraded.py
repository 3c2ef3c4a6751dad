"""Notes on what an engine lacks of what was asked for, or of what an export offers by default."""

from typing import Literal

Kind = Literal["engine", "passes", "precision", "sizes", "branch", "output"]


class Downgraded(str):
    """A note on something that an engine lacks."""

    kind: Kind
    option: str
    """What accepts it, or asks for just that; empty: there is no such option."""
    is_asked: bool
    """Whether it was asked for; what is only offered by default needs no consent."""

    def __new__(
        cls, text: str, kind: Kind, option: str = "", *, is_asked: bool = False
    ) -> "Downgraded":
        """A sentence, and what it is about."""
        made = super().__new__(cls, text)
        made.kind, made.option, made.is_asked = kind, option, is_asked
        return made

    def with_reason(self, reason: str) -> "Downgraded":
        """The same, and why."""
        return Downgraded(f"{self}: {reason}", self.kind, self.option, is_asked=self.is_asked)
