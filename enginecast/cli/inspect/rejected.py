"""What `enginecast inspect DIR.rejected` says; it needs no torch."""

from pathlib import Path

import msgspec

from enginecast.cli.terminal.output import print_json, results, say
from enginecast.verification.report.files import HTML_NAME, JSON_NAME, read_report
from enginecast.verification.report.tables import print_report


def show_rejected(path: Path, *, as_json: bool) -> None:
    """Print why an engine was rejected.

    Raises:
        BundleError: the report cannot be read.
    """
    report = read_report(path)
    if as_json:
        print_json(msgspec.to_builtins(report))
        return
    console = results()
    say(console, f"{report.model} in {report.precision} for {report.target}")
    say(console, f"pipeline {report.pipeline or 'none'}")
    print_report(report, console)
    page = path / HTML_NAME
    say(
        console,
        f"nothing was published; {page if page.exists() else path / JSON_NAME} has all of it",
    )
