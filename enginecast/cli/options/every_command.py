"""Options that every command has: --config, --quiet, --verbose, and those that show its help."""

import difflib
import tomllib
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from enginecast.cli.options.from_fields import Quiet, Verbose
from enginecast.cli.terminal.help import ALL, HELP
from enginecast.cli.terminal.output import be_quiet, errors, say, show_log
from enginecast.errors import UsageError, first_line
from enginecast.option_fields import RENAMED, TOPICS

OF_NONE = ("config", "help")
"""What no file has: the options of these names, and those that begin so."""


def _with_new_names(
    section: dict[str, Any], known: dict[str, Any], path: Path
) -> Iterator[tuple[str, Any]]:
    """The options of a file by the names that they have now; those of one name together."""
    joined: dict[str, list[Any]] = {}
    for name, value in section.items():
        old = RENAMED.get(name)
        if name in known or old is None or old.now not in known:
            joined.setdefault(name, []).append(value)
            continue
        if not old.is_short:
            say(errors(), f"warning: --config {path}: {name} is now {old}")
        many = value if isinstance(value, list) else [value]
        joined.setdefault(old.now, []).extend(old.takes(name, one) for one in many)
    for name, values in joined.items():
        lists = [one if isinstance(one, list) else [one] for one in values]
        yield name, values[0] if len(values) == 1 else [one for each in lists for one in each]


def _read(context: typer.Context, path: Path | None) -> None:
    """Take the values of a file for options that are not on the command line."""
    if path is None:
        return
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, a number of 5000 digits
        raise UsageError(f"--config {path}: {first_line(error)}") from error
    command = context.command_path.split()[1:]
    table = ".".join(command)
    section: Any = content  # such as [export] or [cache.fill]
    for name in command:
        section = section.get(name, {}) if isinstance(section, dict) else section
    if not isinstance(section, dict):
        raise UsageError(f"--config {path}: {table}: expected a table, got {section!r}")
    loose = [name for name, value in content.items() if not isinstance(value, dict)]
    if loose:
        raise UsageError(
            f"--config {path}: {loose[0]}: expected it in the table of a command",
            hint=f"Put it below [{table}].",
        )
    known: dict[str, Any] = {}  # by what a user calls them: "precision", and "model" for MODEL
    for parameter in context.command.params:
        if parameter.param_type_name == "argument":
            known[str(parameter.name)] = parameter
        known |= {one[2:]: parameter for one in parameter.opts if one.startswith("--")}
    known = {name: one for name, one in known.items() if name.partition("-")[0] not in OF_NONE}
    found: dict[str, Any] = {}
    for name, value in _with_new_names(section, known, path):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else "Names are those of --help."
            raise UsageError(f"--config {path}: {table}.{name}: no such option", hint=hint)
        parameter = known[name]
        many = parameter.multiple or parameter.nargs == -1
        wrong = isinstance(value, dict) or isinstance(value, list) != many
        flag = getattr(parameter, "is_flag", False)
        if many and not isinstance(value, list | dict):
            value, wrong = [value], False
        if wrong or isinstance(value, bool) != flag:
            kind = "true or false" if flag else "a list" if many else "one value"
            raise UsageError(f"--config {path}: {table}.{name}: expected {kind}, got {value!r}")
        # As text, which is what the types of options parse.
        text = [str(one) for one in value] if many else value if flag else str(value)
        found[parameter.name] = text
    context.default_map = found


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="Read options from this file, as in `[export]` `precision = 'fp16'`; the command"
        " line wins.",
        is_eager=True,
        expose_value=False,
        callback=_read,
    ),
]


def _help_of(topic: str) -> Any:
    """The option that shows the help of a topic; it needs nothing else of the command line."""

    def show(context: typer.Context, asked: bool) -> None:
        if asked and not context.resilient_parsing:
            context.meta[HELP] = topic
            print(context.get_help())
            raise typer.Exit

    return Annotated[
        bool,
        typer.Option(
            f"--help-{TOPICS.get(topic, topic)}",
            rich_help_panel=HELP,
            help="Show these options alone." if topic in TOPICS else "Show all options.",
            is_eager=True,
            expose_value=False,
            callback=show,
        ),
    ]


def _headings(parameters: list[Parameter]) -> list[str]:
    """Of the options of a command, in order."""
    options = [said for one in parameters for said in get_args(one.annotation)[1:]]
    found = {getattr(said, "rich_help_panel", None) for said in options}
    return [heading for heading in TOPICS if heading and heading in found]


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that all have, and that it does not have itself."""
    own = signature(command)
    parameters = list(own.parameters.values())
    annotations = dict(getattr(command, "__annotations__", {}))
    added = [
        (name, annotation, default)
        for name, annotation, default in (("quiet", Quiet, False), ("verbose", Verbose, 0))
        if name not in own.parameters
    ]
    topics = [(f"help_{n}", _help_of(one), False) for n, one in enumerate(_headings(parameters))]
    topics.append(("help_all", _help_of(ALL), False))
    for name, annotation, default in [*added, ("config", Config, None), *topics]:
        parameters.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
        annotations[name] = annotation

    @wraps(command)
    def run(*arguments: Any, **given: Any) -> Any:
        for name in ("config", *(name for name, *_ in topics)):
            given.pop(name, None)  # their callbacks have seen to them
        be_quiet(bool(given.get("quiet")))
        for name, _, default in added:
            value = given.pop(name, default)
            if name == "verbose":
                show_log(int(value))
        return command(*arguments, **given)

    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = annotations
    return run
