"""Commands on the folder of a pipeline: each does what it does with one bundle for all of them."""

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from enginecast.cli.options.from_fields import fetched
from enginecast.cli.terminal.output import (
    collecting_json,
    error_content,
    print_json,
    progress,
    results,
    say,
    show_error,
)
from enginecast.errors import EnginecastError, UsageError
from enginecast.pipelines.record import INDEX, read_record
from enginecast.runtime.bundle.pipeline_folder import pipeline_at

EnginesDir = Annotated[
    Path, typer.Argument(metavar="DIR", help="A bundle, or a pipeline of engines.")
]


class Component(NamedTuple):
    """A component of a pipeline, or one of its methods."""

    name: str
    """Such as "vae/decode"."""
    folder: Path
    eager: str = ""
    """Why it has no engine."""


def of_pipelines(
    argument: str = "bundle", *, alone: Iterable[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command that takes a bundle take a folder of engines, too.

    A `model` and an `other` are then folders of pipelines, of which each component gets its own.

    Args:
        argument: the parameter that is the bundle.
        alone: options that go with one bundle, and not with several.
    """

    def wrapper(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            path = Path(given[argument])
            if pipeline_at(path) != "engines":
                command(**given)
                return
            record = read_record(path)
            parts = [
                Component(f"{name}/{entry}", path / name / entry)
                for name, each in record.components.items()
                for entry in each.engines
            ]
            for option in alone:
                if given.get(option) not in (None, []):
                    raise UsageError(
                        f"{_flag(option)} goes with one bundle, and {path} is a pipeline of"
                        " engines",
                        hint="Its bundles: " + ", ".join(str(each.folder) for each in parts),
                    )
            if given.get("download") and given.get("model"):
                given["model"] = fetched(given["model"])
            beside = {name: given[name] for name in ("model", "other") if given.get(name)}
            beside.pop(argument, None)
            wanted = {"model": "source", "other": "engines"}
            for name, folder in beside.items():
                if pipeline_at(Path(folder)) != wanted[name]:
                    kind = f"the folder of a pipeline, with {INDEX}"
                    expected = kind if name == "model" else "a pipeline of engines, too"
                    raise UsageError(f"{_flag(name)} {folder}: expected {expected}")

            def one(part: Component) -> None:
                inside = {
                    name: str(Path(folder) / part.name.partition("/")[0])
                    if name == "model"
                    else Path(folder) / part.name
                    for name, folder in beside.items()
                }
                kind = type(given[argument])
                command(**{**given, argument: kind(part.folder), **inside})

            parts += [
                Component(name, path / name, each.reason)
                for name, each in record.components.items()
                if not each.engines
            ]
            if not given["as_json"]:
                checked = record.check
                reasons = f": {'; '.join(checked.reasons)}" if checked.reasons else ""
                whole = f"whole pipeline, when it was exported: {checked.outcome}{reasons}"
                say(results(), f"{record.pipeline}; {whole}")
            each_component(record.pipeline, parts, one, as_json=given["as_json"])

        return run

    return wrapper


def each_component(
    pipeline: str,
    parts: Iterable[Component],
    run: Callable[[Component], None],
    *,
    as_json: bool,
) -> NoReturn:
    """Run a command for each component, whatever becomes of the others.

    Raises:
        Exit: always, with the highest exit code.
    """
    found: list[dict[str, Any]] = []
    for part in parts:
        made: dict[str, Any] = {"component": part.name, "folder": str(part.folder)}
        found.append(made)
        console = progress() if as_json else results()
        say(console, f"{part.name}:{part.eager and ' eager, '}{part.eager}", "bold")
        if part.eager:
            made["eager"] = part.eager
            continue
        with collecting_json() as printed:
            try:
                run(part)
                made["exit_code"] = 0
            except typer.Exit as ended:
                made["exit_code"] = ended.exit_code
            except EnginecastError as error:
                show_error(error)
                print_json(error_content(error))
                made["exit_code"] = error.exit_code
        made["result"] = printed[-1] if printed else {}
        if not as_json:
            say(results(), "")
    codes = {each["component"]: each["exit_code"] for each in found if "exit_code" in each}
    if as_json:
        print_json({"pipeline": pipeline, "components": found})
    elif failed := ", ".join(f"{name} ({code})" for name, code in codes.items() if code):
        say(results(), f"exit codes of components: {failed}")
    raise typer.Exit(max(codes.values(), default=0))


def _flag(name: str) -> str:
    return {"other": "OTHER", "output": "-o"}.get(name, f"--{name.replace('_', '-')}")
