"""Write a report as `report.json` and one static `report.html`, and read it again."""

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from enginecast.errors import BundleError
from enginecast.verification.report.data import SCHEMA_VERSION, Report
from enginecast.verification.report.page import page_of

JSON_NAME = "report.json"
HTML_NAME = "report.html"


def write_report(folder: Path, report: Report) -> tuple[Path, Path]:
    """Write `report.json` and `report.html` into a folder; return their paths."""
    as_json, as_html = folder / JSON_NAME, folder / HTML_NAME
    as_json.write_text(to_json(report), encoding="utf-8")
    as_html.write_text(page_of(report), encoding="utf-8")
    return as_json, as_html


def read_report(folder: Path, data: bytes | None = None) -> Report:
    """The report in the folder of a bundle, or of an engine that was rejected.

    Args:
        data: what its file holds, where it was read and checked already.

    Raises:
        BundleError: there is none, it cannot be read, or a newer version wrote it.
    """
    file = folder / JSON_NAME
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise BundleError(
            f"{folder}: expected the folder of a bundle or of a rejected engine, got {found}"
        )
    try:
        data = file.read_bytes() if data is None else data
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version > SCHEMA_VERSION:
            raise BundleError(
                f"{file}: schema_version is {version}, and this version reads up to"
                f" {SCHEMA_VERSION}",
                hint="A newer enginecast wrote it; use that version.",
            )
        return msgspec.json.decode(data, type=Report)
    except OSError as error:
        raise BundleError(
            f"{file}: {error.strerror}",
            hint="Expected a bundle, or DIR.rejected: an export writes a report into both.",
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{file}: not a report of this version: {error}") from error


@dataclass(frozen=True)
class _Version:
    schema_version: int = 1


def to_json(report: Report) -> str:
    """All of a report; the same text for the same report.

    Modules and steps keep their order, which is that of execution.
    """
    content = msgspec.to_builtins(report)
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
