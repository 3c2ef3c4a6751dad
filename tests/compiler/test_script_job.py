"""`--target torchscript`, and the way to it where torch.export refuses a model."""

import contextlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from control_flow import ROWS
from exports import Ran, cast
from safetensors.numpy import load_file, save_file

import enginecast
from enginecast.capture.tracing import ladder
from enginecast.compiler.export.session import export
from enginecast.compiler.publication.bundle import Export
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import CaptureError
from enginecast.runtime.bundle.manifest import MANIFEST_NAME, Manifest
from enginecast.runtime.bundle.manifest_json import decode

BY_NAME = {row.name: row for row in ROWS}
SOURCE = """
import torch
from torch import nn


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        if x.sum() > 0:
            return self.first(x)
        return self.second(x) * 2


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf = Leaf()
        self.last = nn.Linear(6, 3)

    def forward(self, x, **kwargs):
        hidden = self.leaf(x)
        return {"narrow": self.last(hidden), "hidden": hidden}


class Closed(nn.Module):
    def forward(self, x, **kwargs):
        if x.sum() > 0:  # HERE
            return x * 2
        return x - 1


def outer():
    torch.manual_seed(0)
    return Outer(), {"x": torch.randn(3, 6)}


def closed():
    return Closed(), {"x": torch.randn(3, 6)}
"""
HERE = next(n for n, line in enumerate(SOURCE.splitlines(), 1) if "# HERE" in line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("script")
    (made / "branching_model.py").write_text(SOURCE, encoding="utf-8")
    with contextlib.chdir(made):
        yield made


def made_of(name: str, output: Path, target: str = "torchscript") -> Export:
    row = BY_NAME[name]
    return export(
        ExportRequest(row.module(), str(output), target, options=ModelOptions(), example=row.a())
    )


def manifest_of(bundle: Path) -> Manifest:
    return decode((bundle / MANIFEST_NAME).read_bytes())


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    """A leaf that branches, within what cannot be scripted."""
    done = export(ExportRequest("branching_model:outer", "script.bundle", "torchscript"))
    assert done.report.verdict.outcome == "verified"
    assert done.report.notes[0] == "TorchScript: scripted leaf; the rest is traced"
    return folder / "script.bundle"


def feeds(rows: int, shift: float) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(rows).standard_normal((rows, 6)) * 0.1 + shift
    return {"x": drawn.astype(np.float32)}


def test_both_paths_of_a_bundle_are_right(bundle: Path) -> None:
    module = importlib.import_module("branching_model").outer()[0].eval()
    with enginecast.load(bundle, allow_code=True, threads=1) as engine:
        assert engine.provider == "torch-cpu"
        for rows, shift in ((4, 1.0), (9, -1.0)):
            inputs = feeds(rows, shift)
            with torch.no_grad():
                wanted = module(torch.from_numpy(inputs["x"]))
            got = engine.run(inputs)
            for name, tensor in wanted.items():
                np.testing.assert_allclose(got[name], tensor.numpy(), rtol=1e-6)


def test_without_allow_code_it_is_not_opened(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(feeds(4, 1.0), "in.safetensors")
    arguments = ("run", bundle, "--inputs", "in.safetensors", "-o", "out.safetensors")
    refused = cast(capsys, *arguments)
    assert refused.code == 2
    assert "--allow-code" in refused.err
    assert not Path("out.safetensors").exists()
    done = cast(capsys, *arguments, "--allow-code", "--threads", "1")
    assert done.code == 0, done.err
    assert "torch-cpu" in done.out
    assert load_file("out.safetensors")["narrow"].shape == (4, 3)


def test_it_is_verified_again_with_and_without_the_model(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cast(capsys, "verify", bundle).code == 2
    stored = cast(capsys, "verify", bundle, "--allow-code", "--json")
    assert stored.json["outcome"] == "verified"
    model = ("--model", "branching_model:outer")
    again = cast(capsys, "verify", bundle, "--allow-code", "--json", *model)
    assert again.json["outcome"] == "verified"
    assert again.json["notes"] == []
    other = cast(capsys, "verify", bundle, "--allow-code", "--model", "branching_model:closed")
    assert other.code == 2
    assert "gives output_0, but the bundle's engine gives narrow, hidden" in other.err
    assert "judged with torch-cpu of torch 2." in cast(capsys, "inspect", bundle).out


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_computes_in_it(folder: Path, precision: str) -> None:
    request = ExportRequest(
        "branching_model:outer", f"{precision}.bundle", "torchscript", precision
    )
    done = export(request)
    assert done.report.verdict.outcome == "verified"
    assert done.report.verdict.engine == "ran"
    with enginecast.load(done.folder, allow_code=True) as engine:
        assert engine.inputs[0].dtype == "float32"
        got = engine.run(feeds(4, 1.0))["hidden"]
    assert str(got.dtype) == {"bf16": "bfloat16", "fp16": "float16"}[precision]


@pytest.mark.parametrize("extra", [("--pipeline", "canonicalize"), ("--precision", "mixed")])
def test_passes_do_not_go_with_it(
    folder: Path, capsys: pytest.CaptureFixture[str], extra: tuple[str, str]
) -> None:
    arguments = ("export", "branching_model:outer", "-o", "no.bundle", "--target", "torchscript")
    done = cast(capsys, *arguments, *extra)
    assert done.code == 2
    assert f"{extra[0]}" in done.err
    assert "torch.export" in done.err


def test_a_trace_that_bakes_a_branch_is_rejected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("export", "branching_model:closed", "-o", "closed.bundle")
    done = cast(capsys, *arguments, "--target", "torchscript")
    assert done.code == 1
    assert "rejected" in done.out
    assert not Path("closed.bundle").exists()
    assert Path("closed.bundle.rejected/report.json").is_file()


def test_a_branch_on_a_shape_is_scripted_when_its_trace_is_wrong(tmp_path: Path) -> None:
    done = made_of("IfShape", tmp_path / "shape.bundle")
    assert done.report.verdict.outcome == "verified"
    log = (done.folder / "build.log").read_text(encoding="utf-8")
    assert "scripting the modules it warned about" in log
    assert "scripted the whole model" in log


@pytest.fixture
def no_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rewrite had been refused, which takes these models as they are small."""

    def refused(*_: object, **__: object) -> None:
        raise CaptureError("it is not rewritten")

    monkeypatch.setattr(ladder, "rewriting", refused)


def tried(manifest: Manifest) -> list[tuple[str, str]]:
    return [(rung.name, rung.outcome) for rung in manifest.capture]


@pytest.mark.usefixtures("no_rewrite")
def test_where_export_refuses_a_hybrid_becomes_an_onnx_engine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = cast(capsys, "export", "branching_model:outer", "-o", "onnx.bundle")
    assert done.code == 0, done.err
    manifest = manifest_of(folder / "onnx.bundle")
    assert tried(manifest)[0] == ("export", "refused")
    assert tried(manifest)[-1] == ("torchscript", "taken")
    assert [engine.target for engine in manifest.engines] == ["onnxruntime"]
    assert "falling back to TorchScript" in done.err
    again = cast(capsys, "verify", "onnx.bundle", "--model", "branching_model:outer", "--json")
    assert again.json["outcome"] == "verified"


@pytest.mark.usefixtures("no_rewrite")
def test_without_an_onnx_form_it_becomes_a_torchscript_engine_and_needs_consent(
    tmp_path: Path,
) -> None:
    done = made_of("WhileNorm", tmp_path / "while.bundle", "onnxruntime")
    assert done.report.target == "torchscript"
    assert done.bundle is None
    assert done.folder == tmp_path / "while.bundle.rejected"
    manifest = manifest_of(done.folder)
    assert [(each.kind, each.consent) for each in done.withheld] == [("engine", "missing")]
    assert manifest.downgrades == done.report.downgrades
    with enginecast.load(done.folder, allow_code=True) as engine:  # it is whole, to be renamed
        assert engine.manifest.engines[0].verdict.outcome == "verified"
    assert manifest.engines[0].target == "torchscript"
    assert "no ONNX engine: torch's legacy ONNX exporter refuses" in manifest.capture[-1].reason
    assert any("--allow-code to run" in line for line in text_of(done).splitlines())


def text_of(done: Export) -> str:
    return (done.folder / "build.log").read_text(encoding="utf-8")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    return cast(capsys, "export", *arguments, "-o", "refused.bundle")


def test_the_fallback_can_be_forbidden(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = refused(capsys, "branching_model:outer", "--fallback", "none")
    assert done.code == 2
    assert "TorchScript" not in done.err


@pytest.mark.usefixtures("no_rewrite")
def test_what_neither_takes_is_refused_at_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = refused(capsys, "branching_model:closed")
    assert done.code == 2
    assert re.search(rf"branching_model\.py:{HERE}\b", done.err)
    assert "TorchScript does not help: neither the model itself (Closed)" in done.err
    assert not Path("refused.bundle").exists()
