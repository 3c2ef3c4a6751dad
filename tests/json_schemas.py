"""The published JSON Schemas: made from the types that are written, by

python tests/json_schemas.py
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from enginecast.runtime.bundle.manifest import Manifest
from enginecast.verify.report.data import Report

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "schemas"
TYPES: dict[str, type] = {"manifest.schema.json": Manifest, "report.schema.json": Report}
TITLES = {
    "manifest.schema.json": "manifest.json of an enginecast bundle",
    "report.schema.json": "report.json of an enginecast export",
}


def schema(name: str) -> dict[str, Any]:
    """The schema of a file that enginecast writes."""
    made = msgspec.json.schema(TYPES[name])
    if TYPES[name] is Manifest:  # a digest of all other lines, which the reader checks and drops
        digest = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
        made["$defs"]["Manifest"]["properties"]["digest"] = digest
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": TITLES[name],
        **made,
    }


def text(name: str) -> str:
    """As it is published."""
    return json.dumps(schema(name), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file in TYPES:
        (FOLDER / file).write_text(text(file), encoding="utf-8")
