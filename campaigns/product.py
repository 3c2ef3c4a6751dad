"""The product as the campaigns use it: the command line of an export, and what it says."""

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginecast.cli.app import main


def export(
    model: str, bundle: Path, options: Sequence[str], command: str = "export"
) -> tuple[int, dict[str, Any]]:
    """Run `export`, or `diffusers export`; its exit code, and what it printed as JSON."""
    words = [
        *command.split(),
        model,
        "-o",
        str(bundle),
        "--json",
        "--threads",
        "1",
        "--allow-fallback",
    ]
    words += options
    out, code = bundle.with_suffix(".json"), 0
    with out.open("w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
        try:
            main(words)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 70
    sys.stderr.flush()
    try:
        reported: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        reported = {}
    return code, reported


def reasons(reported: dict[str, Any]) -> list[str]:
    """Why an export was rejected that ended with 1."""
    return reported.get("verdict", {}).get("reasons") or [reported.get("message", "")]
