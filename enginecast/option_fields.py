"""Options of a user, each said once: as the field of a dataclass, with its help and its heading.

The command line, `--config` and the pages of the docs are made from the fields; Python code makes
the dataclass itself.  Names that options had before stand here, too.  No torch: `--help` reads it.
"""

import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from enginecast.errors import UsageError

TOPICS = {
    "": "",
    "Precision and passes": "precision",
    "Target": "target",
    "Model and inputs": "inputs",
    "Verification": "verification",
    "Run of the pipeline": "run",
    "Loading": "loading",
    "Encoder": "encoder",
    "Storage and workers": "storage",
}
"""Headings of groups of options, in the order of `--help`, and the TOPIC of `--help-TOPIC`."""
_Made = TypeVar("_Made", bound=Callable[..., Any])


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


class Renamed(NamedTuple):
    """What an option of an older name is called now, without the first dashes."""

    now: str
    value: str = "{}"
    """The value now, with the one that was given in it."""
    is_flag: bool = False
    """Whether the old name took no value."""
    only: str = ""
    """The one value that the old name took, where the new one is a flag."""
    is_short: bool = False
    """Whether it is no older name, and stays."""

    def __str__(self) -> str:
        value = self.value.format("true" if self.is_flag else "...")
        return f"--{self.now}" if self.value == "{}" else f"--{self.now} {value}"

    def takes(self, name: str, value: Any) -> Any:
        """The value for the new name: a text, or whether the flag is set.

        Raises:
            UsageError: the old name took one value, and not this.
        """
        if self.only:
            if value not in (None, "", self.only):
                raise UsageError(f"--{name} {value}: expected {self.only}")
            return value == self.only
        if self.value == "{}":
            return value
        return self.value.format(str(value).lower() if self.is_flag else value)


RENAMED: Mapping[str, Renamed] = {
    "trust": Renamed("public-key"),
    "trust-digests": Renamed("no-digests", is_flag=True),
    "texts": Renamed("prompts"),
    "text": Renamed("prompt"),
    "engine": Renamed("runner"),
    "state": Renamed("stateful", only="inputs"),
    "task": Renamed("kv-cache", only="text-generation"),
    "opt-shape": Renamed("target-option", "opt-shape={}"),
    **{
        f"trt-{key}": Renamed("target-option", f"{key}={{}}")
        for key in ("route", "workspace", "timing-cache", "hardware", "level")
    },
    **{
        f"trt-{key}": Renamed("target-option", f"{key}={{}}", is_flag=True)
        for key in ("refit", "strip-weights", "version-compatible")
    },
    "profile": Renamed("target-option", "profile={}", is_short=True),
    "compute": Renamed("target-option", "compute={}", is_short=True),
    "strip-weights": Renamed("target-option", "strip-weights={}", is_flag=True, is_short=True),
}
"""Old and short names of options: on the command line, in `--config`, in Python."""


def takes_old_names(made: _Made) -> _Made:
    """Let a function, or a dataclass, be called with the older names of its arguments, too."""
    known = signature(made).parameters
    call: Any = made.__init__ if isinstance(made, type) else made  # type: ignore[misc]

    @wraps(call)
    def start(*values: Any, **given: Any) -> Any:
        for name in [one for one in given if one not in known and one in RENAMED]:
            renamed = RENAMED[name]
            now = renamed.now.replace("-", "_")
            if not renamed.is_short:
                warnings.warn(f"{name} is now called {now}", DeprecationWarning, stacklevel=2)
            if now in given:
                raise UsageError(f"{name} and {now} are the same: give {now} alone")
            given[now] = renamed.takes(name, given.pop(name))
        return call(*values, **given)

    if not isinstance(made, type):
        return start  # type: ignore[return-value]
    made.__init__ = start  # type: ignore[misc]
    return made


def options_of(owner: Any) -> Iterator[tuple[Field[Any], Option]]:
    """The options of a dataclass, in order: fields like `size: Annotated[int, Option("Size.")]`."""
    for each in fields(owner):
        for said in getattr(each.type, "__metadata__", ()):
            if isinstance(said, Option):
                yield each, said


def flag_of(each: Field[Any], said: Option | None) -> str:
    """The spelling of an option on the command line, without its first dashes."""
    return (said and said.flag) or each.name.replace("_", "-")


def is_many(kind: Any) -> bool:
    """Whether an option of this type may be given more than once."""
    return get_origin(kind) in (Sequence, Mapping)


def require_choices(options: Any, written: str = "--{} {}") -> None:
    """Refuse a value that is none of its option's choices.

    Args:
        written: how a user gives an option: its name, then its value.

    Raises:
        UsageError: names them.
    """
    for each, said in options_of(options):
        value = getattr(options, each.name)
        if said.choices and value not in (each.default, *said.choices):
            many = len(said.choices) > 2
            expected = f"one of {', '.join(said.choices)}" if many else " or ".join(said.choices)
            given = written.format(flag_of(each, said), value)
            raise UsageError(f"{given}: expected {expected}")


TARGET_OPTION = "--target-option {}={}"
"""How a user gives an option of a target."""


def said_target_option(text: str) -> str:
    """An option of a target, KEY=VALUE, as a user gives it: by its short name, where it has one."""
    key, _, value = text.partition("=")
    short = RENAMED.get(key)
    if short is None or not short.is_short or (short.is_flag and value not in ("", "true")):
        return f"--target-option {text}"
    return f"--{key}" if short.is_flag else f"--{key} {value}"


def target_option_keys(owner: Any) -> dict[str, tuple[Field[Any], Option | None]]:
    """The fields of a target's options by what users call them."""
    said = {each.name: said for each, said in options_of(owner)}
    return {
        flag_of(each, said.get(each.name)): (each, said.get(each.name)) for each in fields(owner)
    }


def parse_target_options(owner: Any, texts: Sequence[str], target: str) -> Any:
    """An instance of the dataclass of a target's options, from texts such as "level=3".

    Raises:
        UsageError: an unknown key, with those that there are, or a value that does not fit.
    """
    known, kinds = target_option_keys(owner), get_type_hints(owner)
    given: dict[str, list[str]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if key not in known:
            raise UsageError(
                f"{said_target_option(text)}: --target {target} has no option '{key}'",
                hint=f"It has {', '.join(known)}.",
            )
        given.setdefault(key, []).append(value if equals else "true")
    made: dict[str, Any] = {}
    for key, values in given.items():
        each, said = known[key]
        kind = kinds[each.name]
        if is_many(kind):
            made[each.name] = said.parse(values) if said and said.parse else tuple(values)
        elif len(values) > 1:
            raise UsageError(f"{said_target_option(f'{key}={values[-1]}')}: {key} is given twice")
        else:
            parse = said.parse if said and said.parse else _reader(kind)
            try:
                made[each.name] = parse(values[0])
            except (LookupError, ValueError):
                raise UsageError(
                    f"{TARGET_OPTION.format(key, values[0])}: expected {described(kind, said)}"
                ) from None
    return owner(**made)


def _reader(kind: Any) -> Callable[[str], Any]:
    """What makes a value of a type from a text."""
    [kind, *_] = [one for one in get_args(kind) or (kind,) if one is not types.NoneType]
    if kind is bool:
        return {"true": True, "false": False}.__getitem__
    return kind if kind in (int, float, Path) else str


def described(kind: Any, said: Option | None) -> str:
    """What values an option of this type takes, for users."""
    if said is not None and said.metavar:
        return said.metavar
    kinds = [one for one in get_args(kind) or (kind,) if one is not types.NoneType]
    names = {bool: "true or false", int: "a number", float: "a number", Path: "a path"}
    return names.get(kinds[0], "a text")
