"""Quantized exports from end to end: presets, plans as files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import Exports, cast
from family_models import FAMILIES
from safetensors.numpy import save_file

import enginecast
from enginecast.runtime.load import load
from enginecast.verification import boundaries
from enginecast.verification.program import observer

PIXELS = "pixel_values"


def manifest_of(bundle: Path) -> Any:
    return json.loads((bundle / "manifest.json").read_text())


def plan_of(bundle: Path) -> Any:
    return json.loads((bundle / "plan.json").read_text())


@pytest.fixture(scope="module")
def bert(exports: Exports) -> Path:
    return Path(exports.model("bert"))


@pytest.fixture(scope="module")
def vit(exports: Exports) -> Path:
    return Path(exports.model("vit"))


@pytest.mark.slow
def test_int8_on_the_cpu(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    asked = ("--precision", "int8", "--max-error", "cos=0.98")
    done = cast(capsys, "export", bert, "-o", bundle, *asked, "--json")
    assert done.code == 0, done.err
    assert done.json["outcome"] == "verified"
    assert min(output["cosine"] for output in done.json["verdict"]["outputs"]) >= 0.98
    assert done.json["precision"] == "int8"
    assert done.json["ops"]["com.microsoft::MatMulIntegerToFloat"] == 13
    manifest, plan = manifest_of(bundle), plan_of(bundle)
    assert manifest["quantization"]["precision"] == "int8"
    assert manifest["quantization"]["least_cosine"] == pytest.approx(0.98)
    assert manifest["quantization"]["predicted_error"] == plan["predicted_error"]
    assert plan["model"] == manifest["model"]["fingerprint"]
    assert {layer["choice"] for layer in plan["layers"]} == {"storage", "w8a8-dynamic"}
    error = max(output["error"] for output in done.json["verdict"]["outputs"])
    assert 1e-3 < error < plan["max_error"]
    for errors in (plan["errors"], done.json["verdict"]["errors"]):
        assert errors.keys() == set(done.json["verdict"]["cases"])
        assert max(errors.values()) <= plan["max_error"]

    # A person looks at the plan, wants one layer whole, and exports with it.
    plan["layers"][-1] |= {"choice": "keep", "reason": "the pooler is small"}
    (tmp_path / "mine.json").write_text(json.dumps(plan))
    again = tmp_path / "again"
    options = ("--plan", tmp_path / "mine.json", "--json")
    done = cast(capsys, "export", bert, "-o", again, *options)
    assert done.code == 0, done.err
    assert done.json["ops"]["com.microsoft::MatMulIntegerToFloat"] == 12
    assert plan_of(again)["layers"][-1]["reason"] == "the pooler is small"

    checked = cast(capsys, "verify", again, "--json")
    assert checked.code == 0, checked.err
    checked = cast(capsys, "verify", again, "--model", bert, "--json")
    assert checked.code == 0, checked.err


def test_fp8_on_the_cpu(vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    done = cast(capsys, "export", vit, "-o", bundle, "--precision", "fp8")
    assert done.code == 0, done.err
    assert "1.0x the error of eager fp32+fp8" in done.out
    assert "fp8 plan for cpu: 1 keep, 13 w8a8-dynamic" in done.out
    shown = cast(capsys, "inspect", bundle)
    assert shown.out.splitlines()[0].endswith(" in fp8, by enginecast 0.1.0")
    assert "float8_e4m3fn" in shown.out.lower() or "f8_e4m3" in shown.out.lower()
    with load(bundle, require="verified") as engine:
        sizes = [size for size in engine.inputs[0].shape[1:] if isinstance(size, int)]
        pixels = np.zeros((1, *sizes), np.float32)
        assert engine.run({PIXELS: pixels})


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    done = cast(capsys, *arguments)
    assert done.code == 2
    assert not Path(str(arguments[3])).exists()
    return done.err


@pytest.mark.slow
def test_a_plan_of_another_model_is_refused(
    bert: Path, vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    options = ("--precision", "int8", "--save-plan", plan, "--json")
    found = cast(capsys, "inspect", bert, *options)
    assert found.code == 0, found.err
    assert found.json["quantization"]["format"] == "int8"
    reported = refused(capsys, "export", vit, "-o", tmp_path / "out", "--plan", plan)
    assert "the plan was made for" in reported
    content = json.loads(plan.read_text())
    content["model"] = {}
    plan.write_text(json.dumps(content))
    reported = refused(capsys, "export", vit, "-o", tmp_path / "out", "--plan", plan)
    assert "the program has no such layer" in reported


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (("--precision", "fp8", "--arch", "sm80"), "It can do: storage."),
        (("--precision", "fp8", "--device", "cuda"), "--arch sm90"),
        (("--precision", "fp8", "--arch", "hopper"), "--arch hopper: expected a GPU architecture"),
        (("--pipeline", "lift-constants", "--max-error", "0.1"), "--max-error goes with --prec"),
        (("--precision", "int8", "--max-error", "2"), "--max-error 2: expected a number between"),
        (("--precision", "int8", "--max-error", "cos=x"), "--max-error cos=x: expected a number"),
        (("--precision", "int8", "--skip-modules-pattern", "nope"), "it matches no layer"),
        (("--plan", "missing.json"), "--plan missing.json: cannot be read"),
        (("--precision", "int8", "--target", "torchscript"), "does not fit --target torchscript"),
    ],
)
def test_what_cannot_be_is_refused(
    options: tuple[str, ...],
    reported: str,
    vit: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reported in refused(capsys, "export", vit, "-o", tmp_path / "out", *options)


def test_a_limit_of_16_bits_holds_at_export_and_later(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "out"
    asked = ("export", vit, "-o", bundle, "--precision", "fp16", "--max-error")
    done = cast(capsys, *asked, "1e-5", "--json")
    assert done.code == 1
    assert "but --max-error allows 1e-05" in done.json["verdict"]["reasons"][0]
    done = cast(capsys, *asked, "0.1", "--overwrite", "--json")
    assert (done.code, done.json["verdict"]["max_error"]) == (0, 0.1)
    for more in ((), ("--model", vit)):
        done = cast(capsys, "verify", bundle, *more, "--json")
        assert (done.code, done.json["verdict"]["max_error"]) == (0, 0.1), done.err


def test_save_plan_needs_a_plan(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = cast(capsys, "inspect", vit, "--save-plan", tmp_path / "plan.json")
    assert done.code == 2
    assert "--save-plan: nothing is quantized here" in done.err


@pytest.mark.parametrize(
    ("ids", "mask", "reported"),
    [
        ([[10_000] * 8], [[1] * 8], "input_ids: expected values in 0..95, got 10000"),
        ([[1] * 8], [[0] * 8], "attention_mask: 0 everywhere, so that all of the input is padding"),
        ([[]], [[]], ": expected values, got shape [1, 0]"),
    ],
)
def test_bad_calibration_is_refused(
    ids: list[list[int]],
    mask: list[list[int]],
    reported: str,
    bert: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs = {"input_ids": np.array(ids, np.int64), "attention_mask": np.array(mask, np.int64)}
    file = tmp_path / "in.safetensors"
    save_file(inputs, file)
    options = ("--precision", "int8", "--inputs", file)
    assert reported in refused(capsys, "export", bert, "-o", tmp_path / "out", *options)


def made(family: str, folder: Path) -> Path:
    (found,) = [each for each in FAMILIES if each.name == family]
    return found.make(folder / "model")


def test_passes_run_with_the_threads_of_what_they_are_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[int] = set()
    run = boundaries.snapshots

    def watched(*given: Any, **named: Any) -> Any:
        used.add(torch.get_num_threads())
        return run(*given, **named)

    monkeypatch.setattr(observer, "snapshots", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        layers = (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        module, example = torch.nn.Sequential(*layers).eval(), {"input": torch.randn(4, 64)}
        enginecast.compile(module, tmp_path / "b", example=example, precision="int8-storage")
    finally:
        torch.set_num_threads(before)
    assert used == {1}
