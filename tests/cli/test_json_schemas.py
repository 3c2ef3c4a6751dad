"""What is published as JSON Schema is what is written, and what `--json` prints.

`exports.cast` holds every JSON output of the other tests to the schemas, too.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundles
import jsonschema
import pytest
from cache_shards import entries, made
from exports import Exports, cast
from json_schemas import CONFIG, FILES, FOLDER, NAMES, OUTPUTS, hold, name_of, text, validator
from safetensors.numpy import save_file

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", NAMES)
def test_the_published_schema_is_that_of_the_type(name: str) -> None:
    published = (FOLDER / f"{name}.schema.json").read_text(encoding="utf-8")
    assert published == text(name), "run `python tests/support/json_schemas.py`"


def test_nothing_else_is_published() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.schema.json" for name in NAMES}


@pytest.mark.parametrize(("model", "precision"), [("t5", "bf16")])
@pytest.mark.parametrize("name", FILES)
def test_real_files_are_valid(name: str, model: str, precision: str, exports: Exports) -> None:
    content = json.loads((exports(model, precision).folder / f"{name}.json").read_text())
    assert [error.message for error in validator(name).iter_errors(content)] == []
    for wrong in ({**content, "verdict": 3, "inputs": 3}, {**content, "more": 1}):
        assert [*validator(name).iter_errors(wrong)]


def test_a_file_of_options_is_valid() -> None:
    takes = validator(CONFIG).is_valid
    assert takes({"export": {"model": "t5", "dynamic": ["x:0=1..4"], "overwrite": True}})
    assert takes({"cache": {"fill": {"prompts": "a.txt", "batch-tokens": 4096, "outputs": "a"}}})
    assert takes({"cache": {"fill": {"texts": "a.txt"}}, "export": {"state": "inputs"}})
    for wrong in ({"export": {"precison": "fp16"}}, {"export": {"overwrite": 1}}, {"x": 1}):
        assert not takes(wrong)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundles.make_bundle(tmp_path / "bundle")


@pytest.fixture
def feeds(tmp_path: Path) -> Path:
    path = tmp_path / "feeds.safetensors"
    save_file(bundles.feeds(), path)
    return path


def test_commands_of_the_small_installation(bundle: Path, feeds: Path, capsys: Capture) -> None:
    out = bundle.with_name("out.safetensors")
    for words in (
        ("run", bundle, "--inputs", feeds, "-o", out),
        ("inspect", bundle),
        ("bench", bundle, "--inputs", feeds, "--rounds", "3", "--seconds", "0"),
        ("tune", bundle, "--inputs", feeds, "--rounds", "3", "--seconds", "0", "--dry-run"),
        ("trust", bundle),
        ("doctor",),
        ("doctor", bundle.parent),
        ("passes",),
        ("run", bundle, "--inputs", bundle / "not there", "-o", out),
    ):
        content = cast(capsys, *words, "--json").json
        assert name_of([*map(str, words)], content) in OUTPUTS


def test_commands_of_caches(tmp_path: Path, capsys: Capture) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made(one).commit(entries(range(5)))
    for words in (
        ("info", one),
        ("verify", one),
        ("merge", one, "-o", two),
        ("compare", one, two),
        ("prune", two, "--dry-run"),
        ("export", one, "-o", tmp_path / "npz", "--format", "npz"),
    ):
        assert cast(capsys, "cache", *words, "--json").json["schema_version"] == 1


@pytest.mark.slow
def test_commands_that_need_torch(exports: Exports, tmp_path: Path, capsys: Capture) -> None:
    model = exports.model("plain")
    for words in (
        ("inspect", model),
        ("inspect", model, "--precision", "fp16"),
        ("inspect", model, "--target", "tensorrt"),
        ("opt", model, "--pipeline", "canonicalize", "--print-ir", "--print-diff"),
        ("bisect", model, "--pipeline", "canonicalize"),
        ("export", model, "-o", tmp_path / "bundle"),
        ("verify", tmp_path / "bundle"),
    ):
        assert cast(capsys, *words, "--json").json


def _more(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "more": 1}


def _no_version(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != "schema_version"}


def _wrong_kind(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "providers": "CPUExecutionProvider"}


@pytest.mark.parametrize("change", [_more, _no_version, _wrong_kind])
def test_other_output_is_found(
    change: Callable[[dict[str, Any]], dict[str, Any]], capsys: Capture
) -> None:
    content = cast(capsys, "doctor", "--json").json
    with pytest.raises(AssertionError, match="doctor"):
        hold(("doctor",), change(content))


def test_users_may_validate_what_later_versions_add(capsys: Capture) -> None:
    content = _more(cast(capsys, "doctor", "--json").json)
    jsonschema.validate(content, json.loads((FOLDER / "doctor.schema.json").read_text()))
