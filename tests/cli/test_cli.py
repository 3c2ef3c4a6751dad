"""Every command: what it prints where, and its exit code."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from exports import Exports, Ran, cast
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from enginecast.cli.app import main
from enginecast.exporters.weights.file import WEIGHTS_FILE

Capture = pytest.CaptureFixture[str]
COMMANDS = ("export", "verify", "run", "inspect", "opt", "bisect", "passes", "doctor")


def process(*arguments: object) -> Ran:
    """Run the command in a process of its own, where torch cannot be imported."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from enginecast.cli.app import main\n"
        "main()\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(autouse=True)
def _where_the_factory_is(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exports.root)


def prompts(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("a b c\n\nx\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_whole_names_of_options(capsys: Capture, command: str) -> None:
    done = cast(capsys, command, "--help")
    assert done.code == 0
    assert "…" not in done.out
    assert "--json" in done.out
    assert cast(capsys, command, "-h").out == done.out


def test_export_has_the_options_that_are_promised(capsys: Capture) -> None:
    shown = cast(capsys, "export", "--help").out
    for option in (
        *("--output", "--target", "--precision", "--pipeline", "--skip-modules-pattern"),
        *("--skip-modules-classes", "--inputs", "--prompts", "--dynamic", "--random-weights"),
        *(
            "--device",
            "--arch",
            "--fallback",
            "--allow-fallback",
            "--overwrite",
            "--allow-code",
            "--quiet",
            "-v",
        ),
    ):
        assert option in shown
    for command in ("verify", "run"):
        shown = cast(capsys, command, "--help").out
        for option in ("--device", "--provider", "--threads", "--allow-code"):
            assert option in shown


def test_without_a_command_the_help_goes_to_stderr(capsys: Capture) -> None:
    done = cast(capsys)
    assert (done.code, done.out) == (2, "")
    assert all(f"  {command} " in done.err for command in COMMANDS)
    assert cast(capsys, "--version").out.startswith("enginecast ")


def test_export_publishes_and_prints_the_verdict_on_stdout(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    bundle = tmp_path / "new" / "bundle"
    done = cast(capsys, "export", exports.model("plain"), "-o", bundle)
    assert done.code == 0
    expected = (
        r"verified: .*x the error of eager fp32",
        r"engine: fp32 for onnxruntime on the CPU; batch 1\.\.64 varies.*",
        rf"{bundle}: \d+ nodes, 0\.0 MiB",
        r"speed: [\d.]+x eager at 1x7x12( \(slower\))?, [\d.]+x at 32x7x12( \(slower\))?"
        r" \(fp32 on \d+ threads? of this CPU(, which was busy)?\)",
        rf"report: {bundle}/report\.html",
    )
    for line, pattern in zip(done.out.splitlines(), expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert "verified" not in done.err
    assert {path.name for path in bundle.iterdir()} == {
        *("build.log", "engine.onnx", "manifest.json", "reference.safetensors"),
        *("report.html", "report.json", "weights.safetensors"),
    }
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def page(bundle: Path) -> str:
    return (bundle / "report.html").read_text(encoding="utf-8")


def test_export_in_json_and_the_refusal_to_overwrite(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    bundle = tmp_path / "bundle"
    command = ("export", exports.model("plain"), "-o", bundle, "--json", "--quiet")
    done = cast(capsys, *command, "--arch", "sm90", "--threads", 1)
    assert (done.code, done.err) == (0, "")
    assert done.json["outcome"] == "verified"
    assert done.json["engine"] == "ran"
    assert done.json["bundle"] == str(bundle)
    assert done.json["rejected"] is None
    assert done.json["speed"]["eager"] > 0
    assert done.json["speed"]["shapes"] == {"features": [1, 7, 12], "keep": [1, 7]}
    assert [case["shapes"]["keep"] for case in done.json["speed"]["cases"]] == [[1, 7], [32, 7]]
    report = json.loads((bundle / "report.json").read_text())
    assert re.fullmatch(r"[\d.]+x eager at .*fp32 on 1 thread of this CPU.*\)", report["speed"])
    assert f"<dd>{report['speed']}</dd>" in page(bundle)
    assert "features [32, 7, 12]" in page(bundle)
    assert report["origin"]["command"] == shlex.join(
        ["enginecast", *map(str, command), "--arch", "sm90", "--threads", "1"]
    )
    profile = report["profile"]
    assert (profile["provider"], profile["shapes"]) == (
        "CPUExecutionProvider",
        {"features": [1, 7, 12], "keep": [1, 7]},
    )
    timed = {(layer["module"], layer["op"]) for layer in profile["layers"]}
    assert timed >= {("norm", "LayerNormalization")}
    assert all(layer["microseconds"] >= 0 for layer in profile["layers"])
    assert json.loads((bundle / "manifest.json").read_text())["engines"][0]["arch"] == "sm90"
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}

    again = cast(capsys, *command)
    assert again.code == 2
    assert again.json == {
        "schema_version": 1,
        "error": "BundleError",
        "message": f"{bundle}: a bundle already exists",
        "hint": "Replace it with --overwrite.",
    }
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before

    replaced = cast(capsys, *command, "--overwrite", "--pipeline", "canonicalize", "--no-speed")
    assert replaced.code == 0
    assert replaced.json["speed"] is None
    assert "x eager" not in page(bundle)
    assert json.loads((bundle / "report.json").read_text())["profile"] is None
    assert json.loads((bundle / "manifest.json").read_text())["pipeline"] == "canonicalize"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_fp16_here_is_verified_by_emulation(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    done = cast(
        capsys,
        *("export", exports.model("plain"), "-o", tmp_path / "b", "--precision", "fp16", "--json"),
        *("--skip-modules-pattern", "narrow", "--skip-modules-classes", "LayerNorm"),
    )
    assert done.code == 0
    assert done.json["speed"] is None  # the CPU provider computes fp16 in fp32
    assert done.json["outcome"] == "verified-by-emulation"
    assert done.json["engine"] == "not run on target"
    assert "keep=narrow keep_classes=LayerNorm" in done.json["pipeline"]


def test_given_inputs_and_ranges_are_used(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    inputs = tmp_path / "in.safetensors"
    rng = np.random.default_rng(1)
    features = rng.standard_normal((2, 7, 12), dtype=np.float32)
    save_file({"features": features, "keep": rng.random((2, 7)) > 0.5}, inputs)
    done = cast(
        capsys,
        *("export", exports.model("plain"), "-o", tmp_path / "b", "--inputs", inputs, "--json"),
        *("--dynamic", "features:0=2..9"),
    )
    assert done.code == 0, done.err
    assert "given inputs" in done.json["verdict"]["cases"]
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["symbols"] == {"batch": [2, 9]}


def test_verify_without_torch(exports: Exports) -> None:
    bundle = exports("t5").folder
    done = process("verify", bundle)
    assert done.code == 0, done.err
    assert "verified: " in done.out
    assert "compared with the stored reference" in done.out
    assert done.err == ""
    reported = process("verify", bundle, "--json", "--threads", 1).json
    assert (reported["outcome"], reported["against"]) == ("verified", "the stored reference")


def test_verify_against_the_model(exports: Exports, capsys: Capture) -> None:
    bundle = exports("plain").folder
    done = cast(capsys, "verify", bundle, "--model", exports.model("plain"), "--json")
    assert (done.code, done.json["against"]) == (0, exports.model("plain"))
    assert done.json["notes"] == []


def test_verify_against_another_model(exports: Exports, capsys: Capture) -> None:
    done = cast(capsys, "verify", exports("t5").folder, "--model", exports.model("plain"))
    assert done.code == 2
    assert "--model plain_model:make takes features, keep, but the bundle's engine" in done.err


def test_verify_against_other_weights(exports: Exports, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    config = Path(exports.model("t5")) / "config.json"
    (folder / "config.json").write_bytes(config.read_bytes())
    bundle = exports("t5").folder
    done = cast(capsys, "verify", bundle, "--model", folder, "--random-weights", 4, "--json")
    assert (done.code, done.json["outcome"]) == (1, "rejected")
    assert done.json["notes"] == [f"{folder} is not the model that the bundle was made from"]


def test_run_on_prompts_without_torch(exports: Exports, tmp_path: Path) -> None:
    bundle, output = exports("t5").folder, tmp_path / "out.safetensors"
    done = process("run", bundle, "--prompts", prompts(tmp_path), "-o", output, "--json")
    assert done.code == 0, done.err
    assert done.json["outputs"] == {"attention_mask": [3, 4], "last_hidden_state": [3, 4, 32]}
    assert done.json["verdict"] == "verified"
    arrays = load_file(output)
    assert arrays["attention_mask"].sum(1).tolist() == [4, 1, 2]
    assert np.isfinite(arrays["last_hidden_state"]).all()
    shown = process("run", bundle, "--prompts", prompts(tmp_path), "-o", output)
    assert "last_hidden_state float32 [3, 4, 32]" in shown.out


def test_run_on_tensors(exports: Exports, tmp_path: Path, capsys: Capture) -> None:
    inputs, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"pixel_values": np.ones((2, 3, 16, 16), np.float32)}, inputs)
    done = cast(capsys, "run", exports("vit").folder, "--inputs", inputs, "-o", output)
    assert (done.code, done.err) == (0, "")
    arrays = load_file(output)
    assert {name: array.shape for name, array in arrays.items()} == {
        "last_hidden_state": (2, 17, 32),
        "pooler_output": (2, 32),
    }
    assert np.array_equal(arrays["pooler_output"][0], arrays["pooler_output"][1])


def test_an_engine_judged_by_emulation_warns_and_runs(exports: Exports, tmp_path: Path) -> None:
    bundle, output = exports("t5", "fp16").folder, tmp_path / "out.safetensors"
    command = [sys.executable, "-m", "enginecast", "run", str(bundle), "-o", str(output)]
    command += ["--prompts", str(prompts(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.startswith("warning: ")
    assert "verified by emulation" in done.stderr


def test_inspect_a_model(
    exports: Exports, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exports.model("t5-wo-in-fp32")
    reported = cast(capsys, "inspect", model, "--precision", "fp16", "--json").json
    assert {row["dtype"]: row["tensors"] for row in reported["census"]} == {"f16": 20, "f32": 2}
    assert reported["expected"] == {"rms-norm": 5, "residual+norm": 4, "attention": 2}
    assert [kept["dtypes"] for kept in reported["dtypes"]["kept_in_fp32"]] == [["f32"]]
    met = {m["what"]: (m["by"], m["count"]) for m in reported["dtypes"]["census"]["meetings"]}
    assert met["cast f16 -> f32"] == ("a weight stored so", 19), "of 20 one is tied"
    monkeypatch.chdir(exports.root)
    done = cast(capsys, "inspect", exports.model("plain"))
    assert done.code == 0
    assert "features: float32 [" in done.out
    assert max(map(len, done.out.splitlines())) <= 120


def test_inspect_a_bundle_without_torch(exports: Exports) -> None:
    bundle = exports("t5").folder
    done = process("inspect", bundle)
    assert (done.code, done.err) == (0, "")
    assert "verified: " in done.out
    assert "[batch, sequence, 32]" in done.out
    with safe_open(bundle / WEIGHTS_FILE, framework="np") as reader:
        kinds = Counter(reader.get_slice(name).get_dtype() for name in reader.keys())  # noqa: SIM118
    assert f"{WEIGHTS_FILE}: {kinds['F32']} tensors F32 (" in done.out
    reported = process("inspect", bundle, "--json").json
    (stored,) = reported.pop("stored").values()
    assert {each["dtype"]: each["tensors"] for each in stored} == kinds
    written = json.loads((bundle / "manifest.json").read_text())
    assert written.pop("digest") not in done.out
    assert reported == written


def test_opt_prints_texts_on_stdout_and_tables_on_stderr(exports: Exports, capsys: Capture) -> None:
    model = exports.model("plain")
    done = cast(capsys, "opt", model, "--pipeline", "canonicalize", "--print-ir")
    assert done.code == 0
    assert all(line.startswith(("%", "return", "#")) for line in done.out.splitlines())
    assert "rewritten" in done.err
    changed = cast(capsys, "opt", model, "--pipeline", "unify-dtype{to=fp16}", "--print-diff")
    assert changed.out.startswith("# unify-dtype\n")
    assert any(line.startswith("+") and "f16" in line for line in changed.out.splitlines())
    halves = ("opt", exports.model("t5-wo-in-fp32"), "--pipeline", "canonicalize", "--print-diff")
    assert cast(capsys, *halves).out.startswith("# bind-weights\n"), "of the capture"
    reported = cast(
        capsys, "opt", model, "--pipeline", "canonicalize", "--print-ir", "--print-diff", "--json"
    ).json
    assert reported["ir"] == done.out
    assert [row["name"] for row in reported["passes"]] == ["canonicalize"]
    assert "diff" in reported["passes"][0]


def test_opt_saves_a_program_that_export_takes(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    program = tmp_path / "program.pt2"
    command = ("opt", exports.model("plain"), "--pipeline", "canonicalize", "-o", program)
    done = cast(capsys, *command)
    assert done.code == 0
    assert "error / floor" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["program.pt2"]
    refused = cast(capsys, "export", program, "-o", tmp_path / "b")
    assert refused.code == 2
    assert "--allow-code" in refused.err
    taken = cast(capsys, "export", program, "-o", tmp_path / "b", "--allow-code", "--json")
    assert taken.json["outcome"] == "verified"
    assert cast(capsys, "verify", tmp_path / "b").code == 0
    with (tmp_path / "b" / "manifest.json").open() as file:
        declared = json.load(file)
    assert [one["name"] for one in declared["outputs"]] == ["hidden", "pooled"]


def test_passes_are_listed_with_their_options(capsys: Capture) -> None:
    done = cast(capsys, "passes")
    assert (done.code, done.err) == (0, "")
    assert "fuse-rms-norm" in done.out
    reported = cast(capsys, "passes", "--json").json["passes"]
    names = {row["name"]: row for row in reported}
    assert set(names["unify-dtype"]["options"]) == {"to", "keep", "keep_classes", "residual"}
    assert names["canonicalize"]["promise"] == "exact"
    assert all(row["summary"] for row in reported)


def test_a_defect_of_ours_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("enginecast.doctor.checks.examine", broken)
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    assert left.value.code == 70
    printed = capsys.readouterr().err
    assert "RuntimeError: planted" in printed
    assert "defect of enginecast" in printed


@pytest.mark.parametrize(("given", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_idle_threads_of_torch_do_not_spin_unless_the_user_wants_it(
    given: str | None, found: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    code = """
import os, sys
from enginecast.__main__ import main
sys.argv = ["enginecast", "--version"]
try:
    main()
finally:
    print(os.environ["OMP_WAIT_POLICY"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == found
