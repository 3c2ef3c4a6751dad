"""`enginecast report`: one report, and two side by side."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from exports import Exports, cast
from reports import full, report

from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.verification.report.comparison import Comparison, Line, Side, compare
from enginecast.verification.report.data import SCHEMA_VERSION, Report
from enginecast.verification.report.files import read_report, write_report

Capture = pytest.CaptureFixture[str]


def written(folder: Path, content: Report) -> Path:
    folder.mkdir()
    write_report(folder, content)
    return folder


def lines(found: Comparison, heading: str) -> dict[str, Line]:
    return {line.name: line for line in found.groups[heading]}


def test_one_report_is_shown_and_drawn_again(
    tmp_path: Path, capsys: Capture, exports: Exports
) -> None:
    folder = exports("t5", "bf16").folder
    done = cast(capsys, "report", folder)
    assert (done.code, done.err) == (0, "")
    assert "in bf16 for onnxruntime" in done.out
    assert done.out.splitlines()[-1] == str(folder / "report.html")
    page = tmp_path / "again.html"
    assert cast(capsys, "report", folder, "-o", page).code == 0
    assert page.read_text(encoding="utf-8") == (folder / "report.html").read_text(encoding="utf-8")
    shown = cast(capsys, "report", folder, "--json").json
    assert (shown["verdict"]["outcome"], shown["report_schema_version"]) == (
        "verified-by-emulation",
        SCHEMA_VERSION,
    )


def test_two_precisions_of_one_model_are_compared(
    tmp_path: Path, capsys: Capture, exports: Exports
) -> None:
    one, other = exports("t5", "fp32").folder, exports("t5", "bf16").folder
    page = tmp_path / "both.html"
    done = cast(capsys, "report", one, other, "-o", page)
    assert done.code == 0
    assert "different models" not in done.out
    assert "eager fp32 and eager bf16" in done.out
    assert page.read_text(encoding="utf-8").count("<div><h3>") == 4
    found = cast(capsys, "report", one, other, "--json").json
    assert found["same_model"] is True
    sizes = {line["name"]: line for line in found["groups"]["Engine"]}["size"]
    assert sizes["other"] < sizes["one"]


def test_no_report_needs_torch_and_a_page_needs_jinja2_alone(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, full()) for name in ("a", "b")]
    page = tmp_path / "page.html"

    def run(*absent: str, output: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys\n"
            f"for name in {absent}: sys.modules[name] = None\n"
            "from enginecast.cli.app import main\n"
            "main(sys.argv[1:])\n"
        )
        command = [sys.executable, "-c", code, "report", *map(str, folders), *output]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    libraries, asked = ("torch", "transformers", "onnx"), ("-o", str(page))
    done = run(*libraries, "jinja2")
    assert (done.returncode, "Engine" in done.stdout) == (0, True), done.stderr
    done = run(*libraries, "jinja2", output=asked)
    assert (done.returncode, page.exists()) == (3, False)
    assert "the page of a report needs jinja2, which is not installed" in done.stderr
    done = run(*libraries, output=asked)
    assert (done.returncode, page.exists()) == (0, True), done.stderr


def test_what_became_worse_is_named() -> None:
    before = full()
    [first, *rest] = before.verdict.outputs
    outputs = (msgspec.structs.replace(first, error=2e-2, ratio=4.0), *rest)
    after = replace(
        before,
        verdict=msgspec.structs.replace(
            before.verdict, outcome="rejected", outputs=outputs, reasons=("4x the error",)
        ),
        fusions=(msgspec.structs.replace(before.fusions[0], engine=3),),
    )
    found = compare(Side("a", before), Side("b", after))
    worse = [line.name for group in found.groups.values() for line in group if line.is_worse]
    assert worse == [
        "verdict",
        "last_hidden_state: relative L2",
        "last_hidden_state: error over eager's",
        "rms norm",
    ]
    assert found.warnings == ()
    assert all(
        not line.differs for line in compare(Side("a", before), Side("a", before)).groups["Passes"]
    )
    assert lines(found, "Outputs")["last_hidden_state: error over eager's"].change == "3.64x"


def test_different_models_are_compared_and_said_to_be(tmp_path: Path, capsys: Capture) -> None:
    one = full()
    assert one.origin is not None
    other = replace(one, origin=replace(one.origin, fingerprint={"weights": "cd" * 32}))
    folders = [written(tmp_path / name, each) for name, each in (("a", one), ("b", other))]
    done = cast(capsys, "report", *folders)
    assert done.code == 0
    assert "note: these are engines of different models (weights differ)" in done.out
    assert cast(capsys, "report", *folders, "--json").json["same_model"] is False


def test_bad_input_is_refused_with_the_place(
    tmp_path: Path, capsys: Capture, exports: Exports
) -> None:
    good = written(tmp_path / "good", report())
    (tmp_path / "empty").mkdir()
    newer = written(tmp_path / "newer", replace(report(), schema_version=SCHEMA_VERSION + 1))
    bundle = tmp_path / "bundle"
    shutil.copytree(exports("t5", "bf16").folder, bundle)
    cases = {
        (good / "report.json",): "expected the folder of a bundle or of a rejected engine, got a",
        (tmp_path / "nowhere",): "got nothing",
        (tmp_path / "empty",): "expected a bundle, but it has no manifest.json",
        (good, newer): f"schema_version is {SCHEMA_VERSION + 1}",
        (good, "-o", bundle / "x.html"): "whose files are sealed by their digests",
        (good, "-o", tmp_path / "no" / "x.html"): "there is no folder",
    }
    for arguments, message in cases.items():
        done = cast(capsys, "report", *arguments)
        assert (done.code, message in done.err) == (2, True), done.err
    manifest = bundle / MANIFEST_NAME
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "schema_version": 99}))
    done = cast(capsys, "report", bundle)
    assert (done.code, "bundle schema 99" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b'{"model": "\xff"}',
        b'{"a":' * 100_000,
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, capsys: Capture, content: bytes) -> None:
    (tmp_path / "report.json").write_bytes(content)
    done = cast(capsys, "report", tmp_path)
    assert done.code == 2
    assert done.err.startswith(f"error: {tmp_path / 'report.json'}: not a report of this version")


def edited(folder: Path, **fields: object) -> Path:
    """A report whose first output has other fields, as nobody wrote them."""
    file = written(folder, full()) / "report.json"
    content = json.loads(file.read_text())
    content["verdict"]["outputs"][0] |= fields
    file.write_text(json.dumps(content))
    return folder


def test_names_give_no_commands_to_a_terminal(tmp_path: Path, capsys: Capture) -> None:
    folder = edited(tmp_path / "one", name="\x1b[2Jhidden")
    content = replace(read_report(folder), model="tiny\x1b]0;owned\x07")
    (folder / "report.html").unlink()
    write_report(folder, content)
    done = cast(capsys, "report", folder)
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert "\\x1b[2Jhidden" in done.out
    assert "tiny\\x1b]0;owned\\x07" in done.out
