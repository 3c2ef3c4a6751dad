"""`enginecast report`: the report of a bundle, or two side by side, without torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from enginecast.cli.options.from_fields import AsJson, grouped, require_folder
from enginecast.cli.options.pipeline_folders import of_pipelines
from enginecast.cli.terminal.output import print_json, results, results_apart, say
from enginecast.errors import BundleError, UsageError, first_line
from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.verification.report.layout import print_table

SHOWN = 24
"""Lines of a table on a terminal."""

if TYPE_CHECKING:
    from enginecast.verification.report.comparison import Comparison, Side


@grouped
@results_apart()
@of_pipelines(alone=("output",))
def report(
    bundle: Annotated[
        Path, typer.Argument(metavar="DIR", help="A bundle, a pipeline, or a folder *.rejected.")
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="A second one to compare with.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.html", help="Write the page here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the report of a bundle, or compare two."""
    from enginecast.verification.report.comparison import compare
    from enginecast.verification.report.page import comparison_page_of, page_of

    if output is not None:
        require_folder(output)
    one = _side(bundle)
    if other is None:
        with _drawing(bundle):
            if output is not None:
                _write(output, page_of(one.report))
            _show(one, output, as_json=as_json)
        return
    second = _side(other)
    with _drawing(bundle, other):
        found = compare(one, second)
        if output is not None:
            _write(output, comparison_page_of(found))
    if as_json:
        page = {} if output is None else {"page": str(output)}
        print_json({**found.to_json(), **page})
    else:
        _print(found, output)


@contextmanager
def _drawing(*folders: Path) -> Iterator[None]:
    """Blame the file for values that no export writes: it is text that anybody can edit.

    Raises:
        BundleError: they cannot be drawn.
    """
    from enginecast.verification.report.files import JSON_NAME

    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        files = " or ".join(str(folder / JSON_NAME) for folder in folders)
        raise BundleError(
            f"{files}: values that do not fit together: {first_line(error)}",
            hint="If nobody edited it, this is a defect of enginecast; please report it.",
        ) from error


def _write(output: Path, page: str) -> None:
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {output}: {error.strerror}") from error


def _side(path: Path) -> "Side":
    """Raises:
    BundleError: the folder holds no report that can be read, one that was changed, or a bundle of
        another version.
    """
    from enginecast.runtime.bundle.reader import open_bundle
    from enginecast.verification.report.comparison import Side
    from enginecast.verification.report.files import JSON_NAME, read_report

    has_report = (path / JSON_NAME).is_file() or not path.is_dir()
    if has_report and not (path / MANIFEST_NAME).is_file():
        return Side(str(path), read_report(path), None)
    bundle = open_bundle(path, check="size")
    # Compared with its digest, where the manifest lists it.
    is_listed = any(one.name == JSON_NAME for one in bundle.manifest.files)
    content = bundle.read(JSON_NAME) if is_listed else None
    return Side(str(path), read_report(path, content), bundle.manifest)


def _show(side: "Side", output: Path | None, *, as_json: bool) -> None:
    from enginecast.verification.report.files import HTML_NAME
    from enginecast.verification.report.tables import print_report

    page = output if output is not None else Path(side.path) / HTML_NAME
    if as_json:
        content = msgspec.to_builtins(side.report)
        content["report_schema_version"] = content.pop("schema_version")
        print_json({**content, "page": str(page)})
        return
    console = results()
    shown = side.report
    say(console, f"{shown.model} in {shown.precision} for {shown.target}")
    print_report(shown, console, "the machine of the export")
    where = f"{page}" if page.exists() else f"{side.path} holds no page; `-o FILE.html` writes one"
    say(console, where)


def _print(found: "Comparison", output: Path | None) -> None:
    console = results()
    for warning in found.warnings:
        say(console, f"note: {warning}", "bold")
    for heading, lines in found.groups.items():
        different = [line for line in lines if line.differs]
        same = len(lines) - len(different)
        if not different:
            say(console, f"{heading}: all {same} are equal")
            continue
        columns = (heading, found.one.path, found.other.path, "change")
        rows = [
            (line.name, line.one, line.other, f"{line.change}{' worse' * line.is_worse}".strip())
            for line in different[:SHOWN]
        ]
        print_table(console, columns, rows)
        if len(different) > SHOWN:
            say(console, f"{len(different) - SHOWN} more differ; -o FILE.html and --json have them")
        if same:
            say(console, f"{same} more are equal")
    if output is not None:
        say(console, str(output))
