"""Which outputs an engine gives: those that a user named, and hidden states by their index."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from enginecast.errors import UsageError

HIDDEN_STATES = "hidden_states"
_INDEX = re.compile(r"0|-?[1-9]\d*")
_HIDDEN_STATE = re.compile(rf"{HIDDEN_STATES}\.(?P<index>{_INDEX.pattern})")


class UnknownOutputError(UsageError):
    """An output was asked for that the model does not give.

    Args:
        name: what was asked for.
        given: the names of the outputs that the model gives.
    """

    def __init__(self, name: str, given: Sequence[str]) -> None:
        super().__init__(
            f"--outputs {name}: the model gives no output {name!r}",
            hint=f"It gives {', '.join(given)}.",
        )
        self.given = tuple(given)


@dataclass(frozen=True)
class Wanted:
    """The outputs that an engine is to give.

    Args:
        names: of the outputs that stay, in order; empty: all that the model gives.
        hidden_states: names `hidden_states.INDEX` of hidden states that come behind them.
    """

    names: tuple[str, ...] = ()
    hidden_states: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.hidden_states)

    @property
    def asks_for_hidden_states(self) -> bool:
        """Whether the model has to be asked for its hidden states."""
        return any(hidden_index(name) is not None for name in (*self.names, *self.hidden_states))

    def chosen(self, given: Sequence[str]) -> tuple[str, ...]:
        """Names of the outputs, in order, of a model that gives `given` by itself."""
        return tuple(dict.fromkeys((*(self.names or given), *self.hidden_states)))


def parse_wanted(
    outputs: str | Sequence[str] = (), hidden_states: Sequence[str | int] = ()
) -> Wanted:
    """Read `--outputs A,B` (each may be a list with commas) and `--hidden-state INDEX`.

    Raises:
        UsageError: an empty name, a name given twice, or an index that is no integer.
    """
    lists = [outputs] if isinstance(outputs, str) else list(outputs)
    names = [name.strip() for text in lists for name in text.split(",")]
    for position, name in enumerate(names):
        if not name or name in names[:position]:
            what = f"{name!r} is given twice" if name else "expected names with commas between them"
            raise UsageError(f"--outputs {','.join(lists)}: {what}")
    indices = [str(index).strip() for index in hidden_states]
    for index in indices:
        if not _INDEX.fullmatch(index):
            raise UsageError(
                f"--hidden-state {index}: expected an integer",
                hint="0 is the first hidden state, -1 the last, -2 the one before it.",
            )
    return Wanted(tuple(names), tuple(f"{HIDDEN_STATES}.{index}" for index in indices))


def hidden_index(name: str) -> int | None:
    """The index of a hidden state by the name of its output; None for any other output."""
    match = _HIDDEN_STATE.fullmatch(name)
    return None if match is None else int(match["index"])
