"""Options of a user, each said once: as the field of a dataclass, with its help and its heading.

The command line, `--config` and the pages of the docs are made from the fields; Python code makes
the dataclass itself.  No torch: `--help` reads them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any

from enginecast.errors import UsageError

HEADINGS = (
    *("", "Precision and passes", "Engine", "TensorRT", "AOTInductor", "Model and inputs"),
    *("Loading", "Encoder"),
)
"""Of groups of options, in the order of `--help`."""


@dataclass(frozen=True)
class Option:
    """How a field is asked for on the command line."""

    help: str
    metavar: str | None = None
    heading: str | None = None
    """In `--help`; None: the `HEADING` of the dataclass."""
    flag: str = ""
    """Its spelling without the first dashes, where that is not the name of the field."""
    commands: Sequence[str] = ()
    """Those that have it; empty: all that take the dataclass."""
    choices: Sequence[str] = ()
    parse: Callable[[Any], Any] | None = None
    """From text, or texts, to the value of the field."""
    kind: Any = None
    """The type on the command line, where that is not the field's."""
    least: float | None = None
    most: float | None = None


def options_of(owner: Any) -> Iterator[tuple[Field[Any], Option]]:
    """The options of a dataclass, in order: fields like `size: Annotated[int, Option("Size.")]`."""
    for each in fields(owner):
        for said in getattr(each.type, "__metadata__", ()):
            if isinstance(said, Option):
                yield each, said


def flag_of(each: Field[Any], said: Option) -> str:
    """The spelling of an option on the command line, without its first dashes."""
    return said.flag or each.name.replace("_", "-")


def require_choices(options: Any) -> None:
    """Refuse a value that is none of its option's choices.

    Raises:
        UsageError: names them.
    """
    for each, said in options_of(options):
        value = getattr(options, each.name)
        if said.choices and value not in (each.default, *said.choices):
            many = len(said.choices) > 2
            expected = f"one of {', '.join(said.choices)}" if many else " or ".join(said.choices)
            raise UsageError(f"--{flag_of(each, said)} {value}: expected {expected}")
