"""Rows of a batch are what they are alone, or the engine is rejected with the block that is wrong:
engines that miscompile on purpose, as TensorRT did at batch sizes above one
(https://github.com/NVIDIA/TensorRT/issues/4853).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import cast
from plugin_target import install, plugin
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.compiler.verify.bundle import NAMES_BLOCK
from enginecast.passes.ir.interpret import interpret_cases
from enginecast.runtime.load import load
from enginecast.runtime.sessions.tensorrt.library import RTX

Capture = pytest.CaptureFixture[str]
Fault = Callable[[Tensor, bool], Tensor]
"""Changes what the third block gives; the flag says whether an output is kept there."""
__all__ = ["install", "plugin"]

MODELS = """
import torch
from torch import nn


class Blocks(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.mixes = mixes

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"logits": x - x.mean(0) if self.mixes else x}


def make(mixes=False):
    torch.manual_seed(0)
    return Blocks(mixes), {"x": torch.randn(2, 8)}


def mixing():
    return make(mixes=True)


class Turned(nn.Module):
    def forward(self, x):
        return x.tanh().transpose(0, 1)


def turned():
    return Turned(), {"x": torch.randn(3, 3, 8)}


class Crowded(nn.Module):
    # Mixes rows from five on, as experts with a capacity do.
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        return y + (torch.ones(x.shape[0]).sum() > 4).float() * y.mean(0, keepdim=True)


def crowded():
    return Crowded().eval(), {"x": torch.randn(2, 3, 32, 32)}
"""


def wrong_row(tensor: Tensor, is_kept: bool) -> Tensor:
    return torch.cat([tensor[:1], tensor[1:2] * 1.5, tensor[2:]])


def wrong_row_if_fused(tensor: Tensor, is_kept: bool) -> Tensor:
    return tensor if is_kept else wrong_row(tensor, is_kept)


def swapped_at_three(tensor: Tensor, is_kept: bool) -> Tensor:
    """Of the sizes of the cases, none is three."""
    return tensor[[0, 2, 1]] if len(tensor) == 3 else tensor


def faulty(fault: Fault, program: ExportedProgram, **inputs: Tensor) -> list[Tensor]:
    kept = {spec.arg.name for spec in program.graph_signature.output_specs}

    def feed(_: int, node: Node, tensor: Tensor) -> Tensor:
        return fault(tensor, node.name in kept) if node.name == "tanh_2" else tensor

    return list(interpret_cases(program, [inputs], feed=feed)[0].values())


@pytest.fixture
def compute_with(
    plugin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Fault], None]:
    """Make the plugin's sessions compute with a fault."""
    (tmp_path / "row_blocks.py").write_text(MODELS, "utf-8")
    monkeypatch.chdir(tmp_path)
    load = torch.export.load

    def set_fault(fault: Fault) -> None:
        def loaded(*args: Any, **options: Any) -> ExportedProgram:
            program: ExportedProgram = load(*args, **options)
            monkeypatch.setattr(program, "module", lambda: partial(faulty, fault, program))
            return program

        monkeypatch.setattr(torch.export, "load", loaded)

    return set_fault


EXPORT = ("export", "row_blocks:make", "--target", "pt2", "--json")
FIRST = "first at 'blocks.2.1' row_blocks.py:14"


@pytest.mark.parametrize(
    ("fault", "place", "helps"),
    [
        (wrong_row, "batch 2, row 1", ", and keeping outputs of modules does not help"),
        (
            wrong_row_if_fused,
            "batch 2, row 1",
            "; keeping its output makes the rows agree: --keep-output blocks.2.1",
        ),
        (swapped_at_three, "batch 3, row 1", ", and keeping outputs of modules does not help"),
    ],
)
def test_a_row_that_is_wrong_in_a_batch_is_refused_with_its_block(
    compute_with: Callable[[Fault], None], capsys: Capture, fault: Fault, place: str, helps: str
) -> None:
    good = cast(capsys, *EXPORT, "-o", "good")
    assert (good.code, good.json["verdict"]["reasons"]) == (0, []), good.err
    assert "rows in a batch of 3" in good.json["verdict"]["cases"]
    compute_with(fault)
    said = f"at {place} of 'logits' parts from what it is alone (relative error "

    done = cast(capsys, *EXPORT, "-o", "out")
    reason = done.json["verdict"]["reasons"][0]
    assert done.code == 1
    assert reason.startswith(said)
    assert reason.endswith(f"; {FIRST}{helps}")

    stored = cast(capsys, "verify", "good", "--allow-code", "--json")
    assert (stored.code, stored.json["verdict"]["reasons"][0].startswith(said)) == (1, True)
    assert stored.json["notes"] == [NAMES_BLOCK]
    anew = cast(capsys, "verify", "good", "--allow-code", "--json", "--model", "row_blocks:make")
    assert (anew.code, anew.json["verdict"]["reasons"][0]) == (1, reason)

    kept = cast(capsys, *EXPORT, "-o", "kept", "--keep-output", "blocks.2.1")
    assert kept.code == (0 if "--keep-output" in helps else 1)


def test_an_output_that_is_kept(
    compute_with: Callable[[Fault], None], capsys: Capture, tmp_path: Path
) -> None:
    """The default target has it in its file, and runs do not return it."""
    export = ("export", "row_blocks:make", "-o", "kept", "--keep-output")
    assert cast(capsys, *export, "blocks.1").code == 0
    with load("kept") as engine:
        assert [one.name for one in engine.manifest.kept] == ["kept_tanh_1"]
        assert list(engine.run({"x": np.zeros((2, 8), "float32")})) == ["logits"]
    assert cast(capsys, "verify", "kept").code == 0

    done = cast(capsys, *export, "blocks.7", "--overwrite")
    assert done.code == 2
    assert "--keep-output blocks.7: no value leaves such a module" in done.err
    assert "blocks.2, blocks.1" in done.err
    done = cast(capsys, *export, "blocks.1", "--overwrite", "--target", "torchscript")
    assert (done.code, "--keep-output does not fit --target torchscript" in done.err) == (2, True)


def test_a_model_that_mixes_rows_says_so(
    compute_with: Callable[[Fault], None], capsys: Capture
) -> None:
    done = cast(capsys, "export", "row_blocks:mixing", "-o", "out", "--json")
    assert (done.code, done.json["verdict"]["reasons"]) == (
        0,
        [
            "rows of a batch were not compared with each alone: in the model, rows of 'logits'"
            " depend on each other"
        ],
    )


def test_a_size_that_equals_the_batch_by_chance_is_no_row(
    compute_with: Callable[[Fault], None], capsys: Capture
) -> None:
    done = cast(capsys, "export", "row_blocks:turned", "-o", "out", "--json")
    assert (done.code, done.json["verdict"]["reasons"]) == (0, [])


def test_each_of_two_engines_may_mix_rows_as_the_model_does(
    compute_with: Callable[[Fault], None], capsys: Capture
) -> None:
    pytest.importorskip(RTX.module)
    sizes = ("--dynamic", "x:0=1..64", "--dynamic", "x:2=32..256", "--dynamic", "x:3=32..256")
    two = ("--target", "tensorrt-rtx", "--also", "onnxruntime")
    done = cast(capsys, "export", "row_blocks:crowded", "-o", "out", "--json", *two, *sizes)
    assert done.code == 0, done.err
    stored = cast(capsys, "verify", "out", "--json")
    assert (stored.code, len(stored.json["verdict"]["reasons"])) == (0, 1), stored.err
    # An engine that does not run here is asked by its fp32 twin.
    alone = cast(capsys, "export", "row_blocks:crowded", "-o", "one", "--json", *two[:2], *sizes)
    assert alone.code == 0, alone.err
    assert any("rows depend on each other" in why for why in alone.json["verdict"]["reasons"])
