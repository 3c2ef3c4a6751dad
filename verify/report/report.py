"""Writes a report: `report.json`, and one static `report.html`."""

import json
from pathlib import Path

import msgspec

from enginecast.verify.report.data import Report
from enginecast.verify.report.page import page_of

JSON_NAME = "report.json"
HTML_NAME = "report.html"


def write_report(folder: Path, report: Report) -> tuple[Path, Path]:
    """Write `report.json` and `report.html` into a folder; return their paths."""
    as_json, as_html = folder / JSON_NAME, folder / HTML_NAME
    as_json.write_text(to_json(report), encoding="utf-8")
    as_html.write_text(page_of(report), encoding="utf-8")
    return as_json, as_html


def to_json(report: Report) -> str:
    """All of a report; the same text for the same report."""
    content = msgspec.to_builtins(report)
    return json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n"
