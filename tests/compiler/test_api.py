"""The Python API: compile, load, verify; and engines where torch cannot be imported."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import Exports
from msgspec.structs import replace
from safetensors.numpy import load_file
from torch import nn

import enginecast
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.weights.finite import require_finite_module
from enginecast.compiler.prepare.program import prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import BundleError, UsageError, VerificationError
from enginecast.runtime.bundle.manifest_json import decode


class Small(nn.Module):
    """A model in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(x)
        return hidden * 1e-3


def example() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(3, 6)}


def test_the_three_verbs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Small()
    bundle = enginecast.compile(module, tmp_path / "bundle", example=example())
    assert bundle.root == tmp_path / "bundle"
    assert bundle.manifest.model.name == "Small"
    x = torch.randn(5, 6)
    with enginecast.load(bundle.root, require="verified") as engine:
        (output,) = engine.run({"x": x.numpy()}).values()
    expected = module(x).detach().numpy()
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    check = enginecast.verify(bundle.root)
    assert check.verdict.outcome == "verified"
    assert check.against == "the stored reference"
    with pytest.raises(BundleError, match="a bundle already exists"):
        enginecast.compile(module, bundle.root, example=example())
    again = enginecast.compile(module, bundle.root, example=example(), overwrite=True)
    assert again.manifest.outputs == bundle.manifest.outputs


def test_a_small_model_is_run_by_one_thread_and_the_callers_are_kept(tmp_path: Path) -> None:
    seen = set()

    class Noting(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            return super().forward(x)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        enginecast.compile(Noting(), tmp_path / "bundle", example=example())
        assert seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_compile_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    module = Small().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    enginecast.compile(module, tmp_path / "bundle", example=example(), precision="fp16")
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert module.training


def test_an_export_hashes_the_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text encoder of ten gigabytes takes half a minute to hash."""
    calls: list[str] = []

    def counted(module: nn.Module, name: str) -> None:
        calls.append(name)
        require_finite_module(module, name)

    monkeypatch.setattr("enginecast.capture.sources.factory.require_finite_module", counted)
    enginecast.compile(Small(), tmp_path / "bundle", example=example())
    assert calls == ["Small"]


def test_equal_calls_give_equal_bundles(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, inputs = Small(), example()
    folders = [
        enginecast.compile(module, tmp_path / name, example=inputs).root for name in ("a", "b")
    ]
    for file in ("engine.onnx", "weights.safetensors", "reference.safetensors"):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file
    first, second = (decode((folder / "manifest.json").read_bytes()) for folder in folders)
    timed = {file.name for file in set(first.files) ^ set(second.files)}
    assert timed <= {"build.log", "report.json", "report.html"}
    assert replace(first, files=()) == replace(second, files=())


@pytest.mark.slow
def test_thorough_takes_the_longest_texts_of_a_large_model(
    exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginecast.capture.inputs.examples.WORK", 1.0)  # every model is large
    source = open_source(str(exports.model("t5")))
    usual, thorough = (
        {case.name for case in prepare(source, ModelOptions(thorough=on), Steps()).cases}
        for on in (False, True)
    )
    assert thorough - usual == {"longest", "empty prompt, 255 pads", "empty prompt, 511 pads"}


def test_a_rejected_export_raises_and_keeps_the_report(tmp_path: Path) -> None:
    module = Small()
    nn.init.constant_(module.linear.weight, 3e4)
    with pytest.raises(VerificationError, match=r"rejected: .*fp16") as caught:
        enginecast.compile(module, tmp_path / "b", example=example(), precision="fp16")
    assert caught.value.exit_code == 1
    assert str(tmp_path / "b.rejected") in caught.value.hint
    assert not (tmp_path / "b").exists()
    assert (tmp_path / "b.rejected" / "report.html").is_file()


def test_bad_arguments_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Small comes without example inputs"):
        enginecast.compile(Small(), tmp_path / "b")
    with pytest.raises(UsageError, match="threads: expected at least 1, got 0"):
        enginecast.compile(Small(), tmp_path / "b", example=example(), threads=0)
    with pytest.raises(UsageError, match="'y'"):
        enginecast.compile(Small(), tmp_path / "b", example={"y": torch.ones(2, 6)})
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = enginecast.nothing


BLOCKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "onnx", "onnxscript"):
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Refuse())
"""

RUN = """
import sys
import numpy as np
import enginecast

with enginecast.load(sys.argv[1], require="verified") as engine:
    ids = np.array([[2, 3, 1]])
    out = engine.run({"input_ids": ids, "attention_mask": np.ones_like(ids)})
assert out["last_hidden_state"].shape == (1, 3, 32)
assert enginecast.verify(sys.argv[1]).verdict.outcome == "verified"
from enginecast.cli.app import main
try:
    main(["run", sys.argv[1], "--prompts", sys.argv[2], "-o", sys.argv[3]])
except SystemExit as stop:
    assert stop.code == 0, stop.code
assert not {"torch", "transformers"} & set(sys.modules)
"""


@pytest.mark.parametrize("before", ["", BLOCKED])
def test_engines_run_where_torch_is_not_imported(
    exports: Exports, tmp_path: Path, before: str
) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.safetensors"
    prompts.write_text("a b\n", encoding="utf-8")
    bundle = exports("t5").folder
    command = [sys.executable, "-W", "error", "-c", before + RUN]
    command += map(str, (bundle, prompts, output))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load_file(output)["last_hidden_state"].shape == (1, 3, 32)
