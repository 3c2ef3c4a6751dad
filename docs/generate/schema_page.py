"""The page of JSON schemas, from the schemas that are published."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = ("manifest", "report")
"""What an export writes."""
FOLDER = Path(__file__).parents[1] / "reference" / "schemas"
HEAD = """# JSON schemas

`manifest.json` and `report.json` of a bundle have JSON Schemas; the tests validate real files against them:
[manifest.schema.json](schemas/manifest.schema.json), [report.schema.json](schemas/report.schema.json).
A file for `--config` has one too: [config.schema.json](schemas/config.schema.json).
The output of `--json` has a `schema_version`, which increases when a field is removed or changes meaning. Each command has its own schema:
"""


def schema_page() -> str:
    """The page."""
    others = sorted(
        {path.name for path in FOLDER.iterdir()}
        - {f"{name}.schema.json" for name in (*FILES, "config")}
    )
    lines = [
        HEAD,
        *(f"- [{name.removesuffix('.schema.json')}](schemas/{name})" for name in others),
        "",
    ]
    for name in FILES:
        schema = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
        lines += [f"## {name}.json", ""]
        for title, part in parts(name, schema):
            lines += [f"### {title}" + " {: #" + f"{name}-{title.lower()}" + " }", ""]
            lines += [" ".join(str(part.get("description", "")).split()), ""]
            lines += list(table(name, part))
    return "\n".join(lines) + "\n"


def parts(name: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a schema, the outermost first."""
    if schema.get("properties"):
        yield name.capitalize(), schema
    for title, part in schema.get("$defs", {}).items():
        if part.get("properties"):
            yield title, part


def table(name: str, part: dict[str, Any]) -> Iterator[str]:
    """The fields of an object."""
    required = part.get("required", ())
    yield "| field | type | |"
    yield "|---|---|---|"
    for field, value in part["properties"].items():
        text = " ".join(str(value.get("description", "")).split()).replace("|", "\\|")
        need = "" if field in required else "optional"
        yield f"| `{field}` | {kind(name, value)} | {'; '.join(filter(None, (need, text)))} |"
    yield ""


def kind(name: str, value: dict[str, Any]) -> str:
    """What a field may hold."""
    if "$ref" in value:
        title = value["$ref"].rpartition("/")[2]
        return f"[{title}](#{name}-{title.lower()})"
    if "anyOf" in value:
        return " or ".join(kind(name, one) for one in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{json.dumps(one)}`" for one in value["enum"])
    if value.get("type") == "array":
        items = value.get("items", value.get("prefixItems"))
        inner = [items] if isinstance(items, dict) else items or []
        return "array of " + (", ".join(kind(name, one) for one in inner) or "anything")
    if value.get("type") == "object":
        inner = value.get("additionalProperties")
        return "object" + (f" of {kind(name, inner)}" if isinstance(inner, dict) and inner else "")
    return str(value.get("type", "anything"))
