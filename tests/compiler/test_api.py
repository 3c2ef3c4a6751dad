"""The Python API: export, load, verify; and engines where torch cannot be imported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import Exports
from safetensors.numpy import load_file
from torch import nn
from torch.export import Dim

import enginecast
from enginecast.capture.sources.factory import arguments_of
from enginecast.errors import (
    BundleError,
    CaptureError,
    InputError,
    SourceError,
    UsageError,
    VerificationError,
)
from enginecast.runtime.bundle.reader import Bundle


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
    bundle = enginecast.compile(torch.compile(module), tmp_path / "bundle", example=example())  # type: ignore[arg-type]
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


class Two(nn.Module):
    """Takes tensors by position, one of them in a dict."""

    def forward(
        self, x: torch.Tensor, pair: dict[str, torch.Tensor], scale: float = 2.0
    ) -> dict[str, torch.Tensor]:
        return {"sum": x + scale * pair["a"].sum(), "half": pair["b"] > 0}


ARGUMENTS = torch.randn(3, 6), {"a": torch.randn(5), "b": torch.randn(4, 4)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = ({0: Dim("rows", max=9)}, {"a": (Dim.AUTO,)})
    folder = tmp_path_factory.mktemp("two") / "bundle"
    return enginecast.export(Two(), folder, example=ARGUMENTS, dynamic=shapes).root


def test_an_engine_takes_positions_and_names_of_arrays_and_tensors(two: Path) -> None:
    with enginecast.load(two) as engine:
        assert [(each.name, each.shape[0]) for each in engine.inputs] == [
            ("x", "rows"),
            ("pair_a", "pair_a_0"),
            ("pair_b", 4),
        ]
        x, (a, b) = ARGUMENTS[0], ARGUMENTS[1].values()
        wanted = Two()(*ARGUMENTS)
        feeds = {"x": x.numpy(), "pair_a": a.numpy(), "pair_b": b.numpy()}
        arrays = [
            engine(feeds),
            engine(*feeds.values()),
            engine(x.numpy(), **dict([*feeds.items()][1:])),
        ]
        for found in (*arrays, engine.run({"x": x, "pair_a": a, "pair_b": b})):
            assert type(found["sum"]) is np.ndarray
            np.testing.assert_allclose(found["sum"], wanted["sum"].numpy(), rtol=1e-5)
        for found in (engine(x, a, b), engine(x, a.numpy(), pair_b=b.numpy())):
            assert torch.allclose(found["sum"], wanted["sum"], rtol=1e-5)
            assert torch.equal(found["half"], wanted["half"])
            assert found.backend == "onnxruntime-cpu"
        with pytest.raises(InputError, match="at most 3 by position, x, pair_a, pair_b, got 4"):
            engine(x, a, b, b)
        with pytest.raises(InputError, match="'x' was given twice"):
            engine(x, x=x)
        with pytest.raises(InputError, match="got text, expected tensors"):
            engine("a red fox")
        with pytest.raises(KeyError, match="'nope' is no output; expected sum, half"):
            engine(x, a, b)["nope"]
        with pytest.raises(UsageError, match="encode: 'normalize' is no option; expected outputs"):
            engine.encode("a red fox", normalize=True)
        with pytest.raises(InputError, match="'pair_b' is missing"):
            engine(x, a)
        for each in (engine, engine.verdict, engine.manifest, engine(x, a, b)):
            assert "\n" not in repr(each)
            assert len(repr(each)) < 300


def test_tensors_come_out_where_torch_is_not_imported_for_arrays(two: Path) -> None:
    code = (
        "import sys, numpy, enginecast; engine = enginecast.load(sys.argv[1]);"
        "engine(*(numpy.zeros(s, 'float32') for s in ((3, 6), (5,), (4, 4))));"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(two)], check=True)


@pytest.mark.parametrize(
    ("example", "found"),
    [
        (ARGUMENTS[0], ["x"]),
        (ARGUMENTS, ["x", "pair"]),
        ([*ARGUMENTS, 3.0], ["x", "pair", "scale"]),
        ({"scale": 3.0, "pair": ARGUMENTS[1], "x": ARGUMENTS[0]}, ["x", "pair", "scale"]),
        (None, []),
        ([*ARGUMENTS, 3.0, 4.0], "has 4 arguments, and forward takes 3 by position: x, pair, sc"),
        (np.zeros(3), "the example is a ndarray, expected a tensor, a tuple or list of the arg"),
        ({0: ARGUMENTS[0]}, "the example is a dict, expected a tensor"),
    ],
)
def test_an_example_by_position_or_by_name(example: object, found: list[str] | str) -> None:
    if isinstance(found, list):
        assert [*arguments_of(example, "Two", Two().forward)] == found
        return
    with pytest.raises(SourceError, match=found):
        arguments_of(example, "Two", Two().forward)


def test_an_automatic_range_is_narrowed_and_another_one_refused(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[1] > 4 else x + 1

    def exported(size: Any) -> Bundle:
        example = torch.randn(3, 8)
        dynamic = {"x": {1: size}}
        return enginecast.export(
            Wide(), tmp_path / str(size), example=example, dynamic=dynamic, fallback="none"
        )

    assert exported(Dim.AUTO).manifest.symbols["x_1"] == (5, 64)
    for size in (Dim.DYNAMIC, Dim("wide")):
        with pytest.raises(CaptureError, match="does not take all sizes of a dimension that was"):
            exported(size)


def test_a_rejected_export_raises_and_keeps_the_report(tmp_path: Path) -> None:
    module = Small()
    nn.init.constant_(module.linear.weight, 3e4)
    with pytest.raises(VerificationError, match=r"rejected: .*fp16") as caught:
        enginecast.compile(
            module, tmp_path / "b", example=example(), pipeline="unify-dtype{to=fp16}"
        )
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
    with pytest.raises(UsageError, match="expected a module or a path, got the class Small"):
        enginecast.compile(Small, tmp_path / "b", example=example())  # type: ignore[arg-type]
    linear = torch.export.export(nn.Linear(8, 2), (torch.ones(3, 8),))
    model: Any
    options: Any
    for model, options, said in (
        (linear, {}, r"an ExportedProgram\nSave it: torch\.export\.save"),
        (torch.jit.script(nn.Linear(8, 2)), {}, "TorchScript module.*\n.*torch.jit.save"),
        (nn.Linear(8, 2, device="meta"), {}, "weights are on the meta device, expected loaded"),
        (nn.Identity(), {"example": torch.ones(2, 3, dtype=torch.complex64)}, "is complex64"),
        (Small(), {"options": {"allow_code": True}}, "ModelOptions, got a dict"),
        (Small(), {"steps": print}, "Steps, got a builtin"),
    ):
        with pytest.raises((UsageError, SourceError), match=said):
            enginecast.compile(model, tmp_path / "b", **{"example": torch.ones(3, 8), **options})
    for name in ("accept", "values"):  # a text alone is one text, and not its letters
        given: dict[str, Any] = {name: "nothing=x"}
        with pytest.raises(UsageError, match=f"--{name} nothing=x"):
            enginecast.compile(Small(), tmp_path / "b", example=example(), **given)
    assert list(tmp_path.iterdir()) == []


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
