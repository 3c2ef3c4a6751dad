"""What is published as JSON Schema is what is written."""

import json
from typing import Any

import jsonschema
import pytest
from exports import Exports
from json_schemas import FOLDER, TYPES, text

FILES = {"manifest.schema.json": "manifest.json", "report.schema.json": "report.json"}


def validator(name: str) -> Any:
    schema = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", TYPES)
def test_the_published_schema_is_that_of_the_type(name: str) -> None:
    published = (FOLDER / name).read_text(encoding="utf-8")
    assert published == text(name), "run `python tests/json_schemas.py`"


@pytest.mark.parametrize(("model", "precision"), [("plain", "fp32"), ("t5", "bf16")])
@pytest.mark.parametrize("name", TYPES)
def test_real_files_are_valid(name: str, model: str, precision: str, exports: Exports) -> None:
    content = json.loads((exports(model, precision).folder / FILES[name]).read_text())
    assert [error.message for error in validator(name).iter_errors(content)] == []
    for wrong in ({**content, "verdict": 3, "inputs": 3}, {**content, "more": 1}):
        found = [*validator(name).iter_errors(wrong)]
        assert found or (name == "report.schema.json" and "more" in wrong)
