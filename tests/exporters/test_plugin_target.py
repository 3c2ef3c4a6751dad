"""A target of another package: examples/plugin_target, as if it were installed."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from exports import Exports, cast
from plugin_target import EXAMPLE, PROJECT, Install, install, plugin
from safetensors.numpy import load_file

from enginecast.errors import DefectError
from enginecast.exporters.registry import TARGETS, target_of
from enginecast.runtime.load import backends, load

Capture = pytest.CaptureFixture[str]
__all__ = ["install", "plugin"]


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_a_plugin_exports_verifies_and_runs(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    model, bundle = exports.model("t5"), tmp_path / "out"
    made = cast(capsys, "export", model, "-o", bundle, "--target", "pt2", "--json")
    assert made.code == 0, made.err
    assert made.json["outcome"] == "verified"
    assert {"program.pt2", "reference.safetensors"} <= {path.name for path in bundle.iterdir()}

    refused = cast(capsys, "verify", bundle)
    assert refused.code == 2
    assert "a pt2 engine runs code when it is loaded" in refused.err
    checked = cast(capsys, "verify", bundle, "--model", model, "--allow-code", "--json")
    assert (checked.code, checked.json["backend"]) == (0, "pt2"), checked.err
    assert "for pt2 on torch-cpu; judged with torch-cpu of torch " in cast(
        capsys, "inspect", bundle
    ).out.replace("\n", " ")

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\nthe quick brown fox\n", encoding="utf-8")
    ran = cast(
        capsys,
        *("run", bundle, "--prompts", prompts, "-o", tmp_path / "by_pt2", "--prefer", "pt2"),
        "--allow-code",
    )
    assert ran.code == 0, ran.err
    onnx = cast(
        capsys, "run", exports("t5").folder, "--prompts", prompts, "-o", tmp_path / "by_onnx"
    )
    assert onnx.code == 0, onnx.err
    by_pt2, by_onnx = (
        load_file(tmp_path / name)["last_hidden_state"] for name in ("by_pt2", "by_onnx")
    )
    np.testing.assert_allclose(by_pt2, by_onnx, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("plugin")
@pytest.mark.slow
def test_a_plugin_is_listed_and_low_precision_is_emulated(
    exports: Exports, tmp_path: Path, capsys: Capture
) -> None:
    assert backends()["pt2"].device == "cpu"
    unknown = cast(capsys, "export", "model", "-o", tmp_path / "out", "--target", "pt3")
    assert unknown.code == 2
    assert "Did you mean 'pt2'" in unknown.err
    bundle = tmp_path / "low"
    made = cast(
        capsys,
        *("export", exports.model("t5"), "-o", bundle, "--target", "pt2", "--precision", "bf16"),
        "--json",
    )
    assert made.code == 0, made.err
    with load(bundle, allow_code=True) as engine:
        assert engine.verdict.arithmetic == "torch-cpu"


def test_a_bundle_of_a_target_that_is_not_installed(
    install: Install,
    exports: Exports,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = tmp_path / "out"
    monkeypatch.chdir(exports.root)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        install({group: dict(names) for group, names in PROJECT["entry-points"].items()})
        made = cast(capsys, "export", exports.model("plain"), "-o", bundle, "--target", "pt2")
        assert made.code == 0, made.err
    shutil.rmtree(tmp_path / "site")
    assert cast(capsys, "inspect", bundle).code == 0
    done = cast(capsys, "verify", bundle, "--allow-code")
    assert done.code == 3
    assert "this build opens tensorrt, tensorrt-rtx, onnxruntime" in done.err
    assert "install the package that brings this one" in done.err


@pytest.mark.parametrize(
    ("name", "where", "message"),
    [
        ("pt2", "no_such_module_here:Pt2", "target 'pt2' cannot be loaded from no_such_module_"),
        ("pt2", "enginecast.errors:Pt2", "target 'pt2' cannot be loaded from enginecast.errors:"),
        ("pt2", "enginecast.errors:UsageError", "is not a subclass of enginecast.exporters.target"),
        ("pt2", TARGETS["tensorrt"], "calls itself 'tensorrt'"),
    ],
)
def test_a_target_that_is_not_usable(
    install: Install, tmp_path: Path, capsys: Capture, name: str, where: str, message: str
) -> None:
    install({"enginecast.targets": {name: where}})
    with pytest.raises(DefectError) as caught:
        target_of(name)
    assert message in caught.value.message
    done = cast(capsys, "export", "json:make", "-o", tmp_path / "out", "--target", name)
    assert done.code == 70
    assert len([line for line in done.err.splitlines() if line.startswith("error:")]) == 1
    assert message in done.err
    assert cast(capsys, "export", "--help").code == 0


@pytest.mark.usefixtures("plugin")
def test_an_exception_of_a_target_is_its_package_s(
    exports: Exports, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("enginecast_pt2")]:
        monkeypatch.delitem(sys.modules, name)
    file = tmp_path / "site" / "enginecast_pt2" / "target.py"
    text = file.read_text("utf-8")
    (where,) = [line for line in text.splitlines() if line.startswith("    def lower(")]
    file.write_text(text.replace(where, f"{where}\n        1 / 0", 1), "utf-8")
    monkeypatch.chdir(exports.root)
    done = cast(capsys, "export", exports.model("plain"), "-o", tmp_path / "out", "--target", "pt2")
    assert done.code == 70
    assert "enginecast-pt2 0.1.0 failed: ZeroDivisionError" in done.err
    assert f"{file}:" in done.err
    assert "defect of enginecast-pt2 0.1.0, not of enginecast" in done.err
