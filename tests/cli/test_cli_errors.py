"""Bad input: one message that names the file or option, the exit code, and nothing left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bundles
import numpy as np
import pytest
from exports import Exports, cast, reseal
from safetensors.numpy import load_file, save_file

from enginecast.compiler.publication.bundle import REPORTS
from enginecast.compiler.publication.manifest import PLAN_NAME
from enginecast.passes import registry

Capture = pytest.CaptureFixture[str]
Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _where_the_factory_is(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    exports.model("plain")
    monkeypatch.chdir(exports.root)


def refused(capsys: Capture, code: int, *arguments: object) -> str:
    """Run a command that must fail in one message; return it in one line."""
    done = cast(capsys, *arguments)
    assert done.code == code, done
    assert done.out == ""
    assert "Traceback" not in done.err
    # A step that took over a second on a busy machine is reported before the error.
    assert any(line.startswith("error: ") for line in done.err.splitlines()), done.err
    assert done.err.count("error: ") == 1
    return " ".join(done.err.split())


def no_export(capsys: Capture, tmp_path: Path, code: int, *arguments: object) -> str:
    """As `refused`, for an export into a folder where nothing may appear."""
    target = tmp_path / "out" / "bundle"
    message = refused(capsys, code, "export", *arguments, "-o", target)
    assert not target.parent.exists() or list(target.parent.iterdir()) == []
    return message


def folder_with(exports: Exports, path: Path, damage: Damage, model: str = "t5") -> Path:
    path.mkdir()
    for file in Path(exports.model(model)).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    damage(path)
    return path


def edit_config(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return damage


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("model", "damage", "expected"),
    [
        ("t5", lambda f: (f / "config.json").unlink(), "config.json is missing"),
        ("t5", lambda f: (f / "config.json").write_text("{nope"), "config.json"),
        ("t5", truncate, "model.safetensors"),
        (
            "t5-relu-shards-fp16",
            lambda f: min(f.glob("model-*")).unlink(),
            "model-00001-of",
        ),
        ("t5", edit_config(auto_map={"AutoModel": "m.M"}), "auto_map"),
        ("t5", edit_config(d_ff=65), "has shape"),
        ("t5", to_pickle, "pytorch_model.bin is a pickle"),
        ("t5", lambda f: (f / "model.safetensors").unlink(), "--random-weights SEED"),
    ],
)
def test_damaged_models(
    exports: Exports, tmp_path: Path, capsys: Capture, model: str, damage: Damage, expected: str
) -> None:
    folder = folder_with(exports, tmp_path / "model", damage, model)
    message = no_export(capsys, tmp_path, 2, folder)
    assert expected in message
    assert str(folder) in message


@pytest.mark.parametrize(
    ("code", "options", "expected"),
    [
        (2, ("--precision", "fp12"), "'fp12' is not a precision Available: fp32, fp16, bf16"),
        (
            2,
            ("--target", "tensorrt", "--arch", "sm90", "--precision", "nvfp4-storage"),
            "sm90 (Hopper: H100, H200) has no NVFP4 weights in TensorRT",
        ),
        (
            2,
            ("--target", "abacus"),
            "unknown target 'abacus' Known: onnxruntime, tensorrt, tensorrt-rtx, aotinductor,",
        ),
        (2, ("--pipeline", "canonicalise"), "unknown pass 'canonicalise' canonicalise ^"),
        (2, ("--pipeline", "unify-dtype{tu=fp16}"), "has no option 'tu' unify-dtype{tu=fp16} ^"),
        (2, ("--pipeline", "unify-dtype{to=fp12}"), "got fp12 unify-dtype{to=fp12} ^"),
        (2, ("--pipeline", "unify-dtype{to=fp64}"), "for references, not for engines"),
        (2, ("--pipeline", "fuse-gelu,canonicalize"), "must come after 'canonicalize'"),
        (2, ("--pipeline", "canonicalize", "--precision", "fp16"), "--precision fp16"),
        (2, ("--precision", "bf16", "--device", "cpu"), "no bf16 kernels"),
        (3, ("--device", "cuda"), "--device cuda: ONNX Runtime has no CUDAExecutionProvider"),
        (2, ("--device", "gpu"), "--device gpu: expected cpu or cuda"),
        (2, ("--arch", "hopper"), "--arch hopper"),
        (2, ("--fallback", "maybe"), "--fallback maybe: expected one of none"),
        (2, ("--optimize", "fast"), "--optimize fast: expected speed or size"),
        (2, ("--optimize", "size"), "It goes with --precision"),
        (2, ("--threads", "0"), "--threads"),
        (2, ("--threads", "many"), "--threads"),
        (2, ("--dynamic", "nonsense"), "--dynamic nonsense: expected NAME:DIM=MIN..MAX"),
        (2, ("--dynamic", "nothing:0=1..4"), "no input 'nothing'; expected one of features, keep"),
        (2, ("--dynamic", "features:9=1..4"), "features has dimensions 0 to 2"),
        (2, ("--skip-modules-pattern", "wo"), "--precision fp16, bf16, mixed, int8 or fp8"),
        (2, ("--skip-modules-pattern", "(", "--precision", "fp16"), "--skip-modules-pattern ("),
        (2, ("--skip-modules-pattern", "zz", "--precision", "fp16"), "'zz' matches no module"),
        (2, ("--skip-modules-classes", "Zz", "--precision", "fp16"), "'Zz'"),
        (2, ("--prompts", "missing.txt"), "--prompts missing.txt"),
        (2, ("--prompts", "empty.txt"), "--prompts empty.txt: expected one prompt a line"),
        (2, ("--inputs", "missing.safetensors"), "--inputs missing.safetensors"),
        (2, ("--inputs", "wrong.safetensors"), "takes no input 'pixels'"),
        (2, ("--inputs", "partial.safetensors"), "keep"),
        (2, ("--random-weights", "1"), "--random-weights 1"),
        (2, ("--bogus",), "--bogus"),
    ],
)
def test_bad_options_of_export(
    exports: Exports,
    tmp_path: Path,
    capsys: Capture,
    code: int,
    options: tuple[str, ...],
    expected: str,
) -> None:
    (exports.root / "empty.txt").write_text("")
    save_file({"pixels": np.zeros((2, 3), np.float32)}, exports.root / "wrong.safetensors")
    partial = {"features": np.zeros((2, 7, 12), np.float32)}
    save_file(partial, exports.root / "partial.safetensors")
    message = no_export(capsys, tmp_path, code, exports.model("plain"), *options)
    assert expected in message


def test_ids_without_a_row_are_refused(exports: Exports, tmp_path: Path, capsys: Capture) -> None:
    ids = np.array([[4, 5, 500]])
    file = exports.root / "ids.safetensors"
    save_file({"input_ids": ids, "attention_mask": np.ones_like(ids)}, file)
    message = no_export(capsys, tmp_path, 2, exports.model("t5"), "--inputs", file)
    assert f"--inputs {file}: input_ids: expected values in 0..95, got 500" in message
    output = tmp_path / "o.safetensors"
    message = refused(capsys, 2, "run", exports("t5").folder, "--inputs", file, "-o", output)
    assert "input 'input_ids': expected values in 0..95, got 500 at [0, 2]" in message


def test_errors_in_json(capsys: Capture, tmp_path: Path) -> None:
    for arguments, kind in (
        (("export", "--json"), "UsageError"),
        (("export", "nothing", "-o", tmp_path / "b", "--json"), "SourceError"),
        (("inspect", "--json", "nothing"), "SourceError"),
        (("run", tmp_path, "-o", tmp_path / "o", "--json"), "UsageError"),
        (("verify", tmp_path, "--json"), "BundleError"),
        (("opt", "nothing", "--pipeline", "nothing", "--json"), "SpecError"),
    ):
        done = cast(capsys, *arguments)
        assert done.code == 2
        assert done.json["error"] == kind
        assert done.json["message"] in done.err


def test_folders_in_the_way(exports: Exports, tmp_path: Path, capsys: Capture) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for options in ((), ("--overwrite",)):
        message = refused(capsys, 2, "export", exports.model("plain"), "-o", mine, *options)
        assert f"{mine}: exists and is not a bundle" in message
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.txt"]


FACTORIES = """
import torch
from torch import nn

def raises():
    raise RuntimeError("no disk")

def nonsense():
    return 7

class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x

def branches():
    return Branch(), {"x": torch.randn(3, 4)}
"""


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("raises", "bad_factories:raises raised RuntimeError: no disk"),
        ("nonsense", "bad_factories:nonsense returned a int, expected a module"),
        ("absent", "bad_factories has no attribute 'absent'"),
    ],
)
def test_factories_that_do_not_work(
    exports: Exports, tmp_path: Path, capsys: Capture, factory: str, expected: str
) -> None:
    (exports.root / "bad_factories.py").write_text(FACTORIES)
    assert expected in no_export(capsys, tmp_path, 2, f"bad_factories:{factory}")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("bad_factories.py", "is not a model: a file of unknown kind Name a module and its"),
        ("./bad_factories.py:nonsense", "its function: bad_factories:nonsense."),
        ("parts/layers.py:make", "its function: parts.layers:make."),
        ("/absent/layers.py:make", "its function, in the folder /absent: layers:make."),
        ("https://huggingface.co/t5", "is a URL, expected a model on this machine"),
        ("http://huggingface.co/t5", "is a URL, expected a model on this machine"),
        ("a" * 300, "cannot be read: File name too long"),
    ],
)
def test_paths_and_urls_in_place_of_models(
    exports: Exports, tmp_path: Path, capsys: Capture, model: str, expected: str
) -> None:
    (exports.root / "bad_factories.py").write_text(FACTORIES)
    assert expected in no_export(capsys, tmp_path, 2, model)


def test_control_flow_is_shown_with_its_line(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    file = exports.root / "bad_factories.py"
    file.write_text(FACTORIES)
    line = FACTORIES.splitlines().index("        if x.sum() > 0:") + 1
    message = no_export(capsys, tmp_path, 2, "bad_factories:branches", "--fallback", "none")
    assert f"{file}:{line} if x.sum() > 0:" in message
    assert "a Python branch or loop depends on the value of a tensor" in message
    assert "torch.where" in message


@pytest.mark.parametrize(
    ("code", "options", "expected"),
    [
        (2, (), "give either --inputs FILE.safetensors or --prompts FILE.txt"),
        (2, ("--inputs", "in", "--prompts", "p"), "give either --inputs"),
        (2, ("--inputs", "wrong.safetensors"), "pixels"),
        (2, ("--inputs", "missing.safetensors"), "missing.safetensors"),
        (2, ("--prompts", "missing.txt"), "missing.txt"),
        (2, ("--prompts", "empty.txt"), "empty.txt"),
        (3, ("--prompts", "p.txt", "--device", "cuda"), "CUDAExecutionProvider"),
        (3, ("--prompts", "p.txt", "--provider", "Mars"), "Mars"),
    ],
)
def test_bad_options_of_run(
    exports: Exports,
    tmp_path: Path,
    capsys: Capture,
    code: int,
    options: tuple[str, ...],
    expected: str,
) -> None:
    (exports.root / "empty.txt").write_text("")
    (exports.root / "p.txt").write_text("a b")
    save_file({"pixels": np.zeros((2, 3), np.float32)}, exports.root / "wrong.safetensors")
    output = tmp_path / "out.safetensors"
    message = refused(capsys, code, "run", exports("t5").folder, "-o", output, *options)
    assert expected in message
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused_first(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    lost = tmp_path / "nowhere" / "out.safetensors"
    message = refused(capsys, 2, "run", "nothing", "--prompts", "p.txt", "-o", lost)
    assert f"-o {lost}: there is no folder" in message
    message = refused(capsys, 2, "run", "nothing", "--prompts", "p.txt", "-o", tmp_path)
    assert "expected the name of a file" in message
    message = refused(capsys, 2, "opt", "nothing", "--pipeline", "", "-o", tmp_path / "p.onnx")
    assert "ends in .pt2" in message


def test_a_damaged_bundle(exports: Exports, tmp_path: Path, capsys: Capture) -> None:
    bundle = tmp_path / "bundle"
    folder_with_bundle(exports, bundle)
    data = bytearray((bundle / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (bundle / "weights.safetensors").write_bytes(data)
    (tmp_path / "p.txt").write_text("a b")
    options = ("--prompts", tmp_path / "p.txt", "-o", tmp_path / "o.safetensors")
    for command in (("run", bundle, *options), ("verify", bundle)):
        assert "weights.safetensors has sha256" in refused(capsys, 2, *command)
    assert not (tmp_path / "o.safetensors").exists()


def folder_with_bundle(exports: Exports, target: Path) -> None:
    target.mkdir()
    for file in exports("t5").folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


def test_a_bundle_without_reference_wants_the_model(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    bundle = tmp_path / "bundle"
    folder_with_bundle(exports, bundle)
    (bundle / "reference.safetensors").unlink()
    reseal(bundle)
    message = refused(capsys, 2, "verify", bundle)
    assert "has no reference.safetensors" in message
    assert "--model MODEL" in message


def test_a_pass_that_breaks_its_promise_publishes_nothing(
    exports: Exports, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.PASSES, "perturb", "wrong_pass:Perturb")
    bundle, rejected = tmp_path / "bundle", tmp_path / "bundle.rejected"
    command = ("export", exports.model("plain"), "-o", bundle, "--pipeline", "perturb")
    done = cast(capsys, *command)
    assert done.code == 1
    assert "rejected: " in done.out
    assert "perturb" in done.out
    assert f"nothing was published; the report is in {rejected}" in done.out
    quiet = cast(capsys, *command, "--quiet")
    assert (quiet.code, quiet.err) == (1, "")
    assert quiet.out.startswith("rejected: pass 'perturb' promises 'exact'")
    assert "worst place" not in quiet.out
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.rejected"]
    assert {path.name for path in rejected.iterdir()} == set(REPORTS) - {PLAN_NAME}
    reported = cast(capsys, *command, "--json")
    assert reported.code == 1
    assert (reported.json["outcome"], reported.json["bundle"]) == ("rejected", None)
    assert reported.json["rejected"] == str(rejected)
    assert json.loads((rejected / "report.json").read_text())["verdict"]["outcome"] == "rejected"
    done = cast(capsys, "opt", exports.model("plain"), "--pipeline", "perturb", "-o", "p.pt2")
    assert (done.code, (exports.root / "p.pt2").exists()) == (1, False)


@pytest.mark.slow
def test_an_overflow_that_cannot_be_removed_is_rejected_by_name(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    """No power of two passes through the GELU of the gate."""

    def scale(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        name = "encoder.block.1.layer.1.DenseReluDense.wi_0.weight"
        weights[name] = weights[name] * 1e6
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    folder = folder_with(exports, tmp_path / "loud", scale)
    bundle = tmp_path / "bundle"
    done = cast(capsys, "export", folder, "-o", bundle, "--precision", "fp16", "--json")
    assert done.code == 1
    assert not bundle.exists()
    reason = done.json["verdict"]["reasons"][0]
    place = "encoder.block.1.layer.1.DenseReluDense.wi_0"
    assert f"leave fp16's range at {place}" in reason
    assert "> 65504" in reason
    assert f"rescale-streams left {place}: its values leave fp16's range" in reason
    assert "--precision bf16 has the range" in reason


def test_folders_and_files_in_the_place_of_others(tmp_path: Path, capsys: Capture) -> None:
    file, empty = tmp_path / "file.txt", tmp_path / "empty"
    file.write_text("a text\n")
    empty.mkdir()
    (model := tmp_path / "model").mkdir()
    (model / "config.json").touch()
    out = tmp_path / "out.safetensors"
    for words, message in (
        (("run", file, "--prompts", file, "-o", out), "file.txt: expected the folder of a bundle"),
        (("run", empty, "--prompts", file, "-o", out), "empty: expected a bundle, but it has no"),
        (("generate", model, "--prompt", "x"), "model --kv-cache -o DIR`"),
        (("verify", tmp_path / "no"), "no: expected the folder of a bundle, but it does not exist"),
        (("inspect", empty), "empty: expected a model, but the folder is empty"),
        (("export", file, "-o", tmp_path / "b"), "not a model: a file of unknown kind"),
        (("cache", "info", file), "expected an embedding cache, but it is not a folder"),
        (("cache", "info", empty), "expected an embedding cache, but it has no cache.json"),
        (("doctor", file), "Not a directory"),
        (("doctor", "--config", empty), "Is a directory"),
    ):
        assert message in refused(capsys, 2, *words), words
    assert not out.exists()


@pytest.mark.parametrize("version", [99])
def test_bundles_of_other_versions(version: int, tmp_path: Path, capsys: Capture) -> None:
    bundle = bundles.make_bundle(tmp_path / "bundle")
    path = bundle / "manifest.json"
    content = json.loads(path.read_text()) | {"schema_version": version}
    path.write_text(json.dumps(content))
    for command in ("verify", "inspect", "bench"):
        message = f"bundle schema {version}, this build reads 1 to 2"
        assert message in refused(capsys, 2, command, bundle)


def test_a_reader_that_has_gone_is_no_fault_of_a_model() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "enginecast", "passes"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
