"""`inspect --target tensorrt` and `tensorrt-rtx`: what the parser refuses, or the gate's table."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from exports import Exports, cast

from enginecast.exporters.tensorrt.gate.operators import table

Capture = pytest.CaptureFixture[str]
REFUSED = """
import torch

class Mixed(torch.nn.Module):
    def forward(self, x):
        flags = torch.bitwise_xor(x, 3)
        return torch.bitwise_or(flags, 1)

def make(): return Mixed(), {"x": torch.arange(6)}
"""
UNKNOWN = """
import torch

class Bessel(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)

def make(): return Bessel(), {"x": torch.rand(2, 3)}
"""

TAKEN = """
import torch
from torch import nn

class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.wide(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

def make(): return Attends(), {"x": torch.randn(2, 6, 16)}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "refused_factory.py").write_text(REFUSED, encoding="utf-8")
    (tmp_path / "taken_factory.py").write_text(TAKEN, encoding="utf-8")
    (tmp_path / "unknown_factory.py").write_text(UNKNOWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_a_network_that_is_taken(capsys: Capture) -> None:
    ran = cast(
        capsys,
        *("inspect", "taken_factory:make", "--target", "tensorrt", "--precision", "fp16"),
        *("--dynamic", "x:0=1..8", "--target-option", "opt-shape=x=2x6x16", "--json"),
    )
    assert ran.code == 0, ran.err
    reported = ran.json["tensorrt"]
    assert reported["ready"]
    assert reported["violations"] == []
    assert reported["operators"]["Attention"]["support"] == "yes"
    assert (reported["library"], reported["parsed"]) == (table().library, False)
    assert reported["run"] == "not yet run on real TensorRT by us"
    (row,) = reported["profile"]
    assert (row["least"][0], row["optimal"][0], row["greatest"][0]) == (1, 2, 8)


WAYS = [
    ("tensorrt", "table"),
    ("tensorrt-rtx", "table"),
    ("tensorrt-rtx", "parser"),
]


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target, and whether its library answers."""
    name, way = request.param
    if way == "table":
        monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    elif not find_spec("tensorrt_rtx_bindings"):
        pytest.skip("TensorRT-RTX is not installed")
    return str(name)


@pytest.mark.parametrize("target", WAYS, indirect=True, ids=" by ".join)
def test_violations_come_after_all_else_with_their_lines(
    target: str, capsys: Capture, request: pytest.FixtureRequest
) -> None:
    ran = cast(capsys, "inspect", "refused_factory:make", "--target", target)
    assert ran.code == 2
    reported = [line.strip() for line in ran.out.splitlines() if line.endswith(("tor]", "ser]"))]
    assert [line.partition(": ")[0] for line in reported] == [
        "'node_bitwise_xor' (BitwiseXor, refused_factory.py:6)",
        "'node_bitwise_or' (BitwiseOr, refused_factory.py:7)",
    ]
    asked, title = f"--target {target}: ", "TensorRT-RTX" if "rtx" in target else "TensorRT"
    assert ran.err.endswith(f"{asked}{table().library} does not take this network: 2 violations\n")
    by_parser = "parser" in request.node.callspec.id
    assert (" parses, got no importer [parser]" in reported[0]) is by_parser
    assert (f"{table().library} does not take this network: 2 violations; not run" in ran.out) is (
        by_parser
    )
    assert (f"; not yet run on real {title} by us\n" in ran.out) is not by_parser


@pytest.mark.parametrize("target", WAYS, indirect=True, ids=" by ".join)
def test_one_object_has_the_error_and_the_whole_inspection(
    target: str, capsys: Capture, request: pytest.FixtureRequest
) -> None:
    ran = cast(capsys, "inspect", "refused_factory:make", "--target", target, "--json")
    assert ran.code == 2
    assert ran.json["error"] == "LoweringError"
    assert {one["line"] for one in ran.json["tensorrt"]["violations"]} == {
        "refused_factory.py:6",
        "refused_factory.py:7",
    }
    assert ran.json["tensorrt"]["parsed"] is ("parser" in request.node.callspec.id)
    assert ran.json["inputs"]


def test_an_op_without_an_onnx_form_is_a_refusal_too(capsys: Capture) -> None:
    ran = cast(capsys, "inspect", "unknown_factory:make", "--target", "tensorrt")
    assert ran.code == 2
    assert "ONNX has no form for aten.special_bessel_j0" in ran.err
    assert "unknown_factory.py:6" in ran.err
    assert "input x" in ran.out


@pytest.mark.slow
def test_a_shape_to_tune_for_must_be_one_of_the_range(exports: Exports, capsys: Capture) -> None:
    given = ("inspect", exports.model("vit"), "--target", "tensorrt", "--target-option")
    ran = cast(capsys, *given, "opt-shape=pixels=1x3x32x32")
    assert (
        "--target-option opt-shape=pixels=1x3x32x32: expected one of the inputs pixel_values"
        in ran.err
    )
    ran = cast(capsys, *given, "opt-shape=pixel_values=65x3x16x16")
    assert ran.code == 2
    assert "expected batch from 1 to 64, got 65" in ran.err
