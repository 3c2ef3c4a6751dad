"""What `enginecast inspect DIR.rejected` says; it needs no torch."""

from pathlib import Path

import msgspec

from enginecast.cli.terminal.output import print_json, results, say
from enginecast.errors import BundleError
from enginecast.verify.report.data import Report
from enginecast.verify.report.tables import print_report


def show_rejected(path: Path, *, as_json: bool) -> None:
    """Print why an engine was rejected.

    Raises:
        BundleError: the report cannot be read.
    """
    file = path / "report.json"
    try:
        report = msgspec.json.decode(file.read_bytes(), type=Report)
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise BundleError(f"{file}: not a report of this version: {error}") from error
    if as_json:
        print_json(msgspec.to_builtins(report))
        return
    console = results()
    say(console, f"{report.model} in {report.precision} for {report.target}")
    say(console, f"pipeline {report.pipeline or 'none'}")
    print_report(report, console)
    page = path / "report.html"
    say(console, f"nothing was published; {page if page.exists() else file} has all of it")
