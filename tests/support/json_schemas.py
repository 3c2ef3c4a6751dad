"""The published JSON Schemas: made from the types of what is written and printed, by

python tests/support/json_schemas.py
"""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import json_types
import jsonschema
import msgspec
import typer

from enginecast.cache.upkeep.census import Census
from enginecast.cache.upkeep.checking import Checked
from enginecast.cache.upkeep.comparing import Comparison
from enginecast.cache.upkeep.exporting import Exported
from enginecast.cache.upkeep.merging import Merged
from enginecast.cache.upkeep.pruning import Pruned
from enginecast.cli.app import app
from enginecast.cli.terminal.output import SCHEMA_VERSION
from enginecast.compiler.inspection.plan import Inspection
from enginecast.compiler.inspection.script import ScriptInspection
from enginecast.doctor.checks import Report as Examination
from enginecast.option_fields import RENAMED
from enginecast.pipelines.record import PipelineRecord
from enginecast.runtime.bundle.manifest import Manifest
from enginecast.runtime.bundle.tensor_files import StoredDtype
from enginecast.verification.report.data import Report

FOLDER = Path(__file__).parents[2] / "docs" / "reference" / "schemas"
FILES: dict[str, type] = {"manifest": Manifest, "report": Report}
"""What an export writes."""
Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}


def _of(made_of: Any) -> Schema:
    """The schema of a type, with its own properties on top."""

    def unknown(kind: type) -> Schema:  # an error beside the data, which is not printed
        return {"description": kind.__name__}

    (made,), parts = msgspec.json.schema_components(
        [made_of], schema_hook=unknown, ref_template="#/$defs/{name}"
    )
    top = parts.pop(made["$ref"].rpartition("/")[2]) if "$ref" in made else made
    return {**top, "$defs": parts}


def _with(schema: Schema, **properties: Schema) -> Schema:
    """The same with more properties, all of which are printed."""
    required = dict.fromkeys([*schema.get("required", ()), *properties])
    return {
        **schema,
        "properties": {**schema["properties"], **properties},
        "required": sorted(required),
    }


def _listed(made_of: type, **more: Schema) -> Schema:
    """A cache, and what there is to say of each of its encoders."""
    made = _of(made_of)
    parts = made.pop("$defs")
    parts[made_of.__name__] = made
    encoders = {"type": "array", "items": {"$ref": f"#/$defs/{made_of.__name__}"}}
    return _with(
        {"type": "object", "properties": {}, "$defs": parts}, cache=TEXT, encoders=encoders, **more
    )


def _manifest() -> Schema:
    made = _of(Manifest)
    # A digest of all other lines, which the reader checks and drops.
    made["properties"]["digest"] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    return made


def _inspected() -> Schema:
    made = _of(Inspection)
    del made["properties"]["attempts"]  # for people
    made["required"].remove("attempts")
    made["properties"]["tensorrt"] = {
        "anyOf": [{"type": "null"}, _of(json_types.NetworkCheck) | {"$defs": {}}]
    }
    made["$defs"].update(_of(json_types.NetworkCheck)["$defs"])
    return made


def _bundle() -> Schema:
    made, stored = _of(Manifest), _of(dict[str, list[StoredDtype]])
    made["$defs"].update(stored.pop("$defs"))
    made["properties"]["digest"] = TEXT
    return _with(made, stored=stored)


def _census() -> Schema:
    made = _listed(Census, id=TEXT)
    parts = made["$defs"]
    parts["About"]["properties"].pop("config")  # the model's own, which is long
    parts["Census"]["properties"]["tokens"] = {
        "type": "object",
        "properties": {name: NUMBER_OR_NULL for name in ("least", "median", "longest")},
        "required": ["least", "longest", "median"],
    }
    return made


def _comparison() -> Schema:
    made = _with(_of(Comparison), first=TEXT, second=TEXT)
    for name in ("OutputError", "TextError"):  # an error relative to nothing is null
        for one in made["$defs"][name]["properties"].values():
            if one.get("type") == "number":
                one["type"] = ["number", "null"]
    return made


def _doctor() -> Schema:
    made = _of(Examination)
    made["$defs"]["Package"] = _with(made["$defs"]["Package"], repair=TEXT)
    return made


def _pipeline() -> Schema:
    failed = {"type": "array", "items": TEXT}
    seconds = {"type": "object", "additionalProperties": {"type": "number"}}
    return _with(_of(PipelineRecord), folder=TEXT, failed=failed, seconds=seconds)


SWITCH: Schema = {"type": "boolean"}
VERSION: Schema = {"const": SCHEMA_VERSION}
OUTPUTS: dict[str, Callable[[], Schema]] = {
    "error": lambda: _of(json_types.Error),
    "inspect-model": _inspected,
    "inspect-script": lambda: _of(ScriptInspection),
    "inspect-bundle": _bundle,
    "inspect-rejected": lambda: _of(Report),
    "export": lambda: _of(json_types.Export),
    "verify": lambda: _of(json_types.Verify),
    "run": lambda: _of(json_types.Run),
    "generate": lambda: _of(json_types.Generate),
    "pipeline-components": lambda: _of(json_types.Components),
    "bench": lambda: _of(json_types.Bench),
    "tune": lambda: _of(json_types.Tune),
    "opt": lambda: _of(json_types.Opt),
    "opt-reduce": lambda: _with(_of(json_types.Reduced), **{"pass": TEXT}),
    "bisect": lambda: _of(json_types.Bisect),
    "passes": lambda: _of(json_types.Passes),
    "diffusers-export": _pipeline,
    "diffusers-run": lambda: _of(json_types.DiffusersRun),
    "cache-fill": lambda: _of(json_types.Filled),
    "cache-fill-dry-run": lambda: _of(json_types.Estimated),
    "cache-info": _census,
    "cache-verify": lambda: _listed(Checked, whole=SWITCH),
    "cache-prune": lambda: _listed(Pruned, dry_run=SWITCH),
    "cache-merge": lambda: _listed(Merged),
    "cache-export": lambda: _with(_of(Exported), output=TEXT, name=TEXT, format=TEXT),
    "cache-compare": _comparison,
    "report-bundle": lambda: _with(
        _of(Report), page=TEXT, report_schema_version={"type": "integer"}, schema_version=VERSION
    ),
    "report-comparison": lambda: _of(json_types.Compared),
    "sign": lambda: _of(json_types.Signed),
    "trust": lambda: _of(json_types.Trust),
    "doctor": _doctor,
    "doctor-folder": lambda: _of(json_types.DoctorFolder),
}
"""What `--json` prints, by the command and what it is about."""

CONFIG = "config"
"""The file of options, which a user writes."""
NAMES = (*FILES, *OUTPUTS, CONFIG)


def _config(command: Any) -> Schema:
    """A file for `--config`: a table for each command, with its options by name."""
    made: dict[str, Schema] = {
        name: _config(each) for name, each in getattr(command, "commands", {}).items()
    }
    for each in command.params:
        spelled = [one.removeprefix("--") for one in each.opts if one.startswith("--")]
        is_flag = getattr(each, "is_flag", False)
        value = SWITCH if is_flag else {"type": ["string", "number"]}
        if each.multiple or each.nargs == -1:
            value = {"anyOf": [value, {"type": "array", "items": value}]}
        for name in spelled or [each.name]:
            if name.partition("-")[0] not in ("config", "help", "install", "show", "version"):
                made[name] = {**value, "description": getattr(each, "help", None) or ""}
    for name, renamed in RENAMED.items():
        if renamed.now in made and name not in made:
            one = SWITCH if renamed.is_flag else {"type": ["string", "number"]}
            value = {"anyOf": [one, {"type": "array", "items": one}]}
            value = value if "anyOf" in made[renamed.now] else one
            said = {"description": f"Now {renamed}.", "deprecated": True}
            said = {"description": f"Short for {renamed}."} if renamed.is_short else said
            made[name] = {**value, **said}
    return {"type": "object", "properties": made, "additionalProperties": False}


def schema(name: str) -> Schema:
    """The schema of a file that enginecast writes, or of what a command prints."""
    if name in FILES:
        made = _manifest() if name == "manifest" else _of(FILES[name])
        title = f"{name}.json of an enginecast {'bundle' if name == 'manifest' else 'export'}"
    elif name == CONFIG:
        made, title = _config(typer.main.get_group(app)), "options of enginecast, for --config"
    else:
        version = {} if name == "inspect-bundle" else {"const": SCHEMA_VERSION}
        made = OUTPUTS[name]()
        made = _with(made, schema_version=made["properties"].get("schema_version") or version)
        told = {
            "error": "of any command that fails",
            "pipeline-components": "of a pipeline's folder",
        }
        command = told.get(name, f"enginecast {name}")
        title = f"--json, {command}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": title}


def text(name: str) -> str:
    """As it is published."""
    return json.dumps(schema(name), indent=1, sort_keys=True) + "\n"


def published(name: str) -> Schema:
    found: Schema = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
    return found


@cache
def validator(name: str) -> Any:
    """Of what is published; it takes no property that the schema does not name."""
    content = published(name)
    jsonschema.Draft202012Validator.check_schema(content)
    return jsonschema.Draft202012Validator(_strict(content))


def _strict(part: Any) -> Any:
    if isinstance(part, list):
        return [_strict(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {name: _strict(one) for name, one in part.items()}
    if part.get("type") == "object" and isinstance(part.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


def name_of(words: Sequence[str], content: Schema) -> str:
    """The schema of what a command printed."""
    if "error" in content and "message" in content:
        return "error"
    command, *more = words
    if command in ("cache", "diffusers"):
        command = f"{command}-{more[0]}"
    if isinstance(content.get("components"), list):
        return "pipeline-components"
    if command == "cache-fill" and "dry_run" in content:
        return "cache-fill-dry-run"
    if command == "doctor" and "folder" in content:
        return "doctor-folder"
    if command == "opt" and "script" in content:
        return "opt-reduce"
    if command == "report":
        return "report-comparison" if "groups" in content else "report-bundle"
    if command == "inspect":
        kinds = {"files": "bundle", "floor_dtype": "rejected", "script_branches": "script"}
        return f"inspect-{next((kind for key, kind in kinds.items() if key in content), 'model')}"
    return command


def hold(words: Sequence[str], content: Schema) -> None:
    """Fail where a command printed what its schema does not have."""
    if words:
        name = name_of(words, content)
        found = [
            f"{'.'.join(map(str, each.absolute_path))}: {each.message[:300]}"
            for each in validator(name).iter_errors(content)
            # What a network lacks stands beside the error, as `inspect` prints it.
            if not (name == "error" and each.validator == "additionalProperties")
        ]
        assert found == [], (name, found)
        if name == "pipeline-components":  # each is what the command prints of the one alone
            for each in content["components"]:
                if result := each.get("result"):
                    hold(words, result)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for one in NAMES:
        (FOLDER / f"{one}.schema.json").write_text(text(one), encoding="utf-8")
