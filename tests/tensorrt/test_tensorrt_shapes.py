"""Shapes: ranges, volumes, and how sizes are read."""

from typing import Any

import onnx_ir as ir
import pytest
from tensorrt_graphs import model_of

from enginecast.exporters.tensorrt.gate.check import Violation, check_ready
from enginecast.exporters.tensorrt.gate.shape_rules import (
    bounds,
)
from enginecast.runtime.bundle.manifest import Input

PAIR = """(float[batch, sequence] a, float[batch, 4] b) => (float[batch, sequence] c) {
    c = Relu(a)
}"""
RANGES = {"batch": (1, 8), "sequence": (2, 64)}


def found(**changed: Any) -> list[Violation]:
    return check_ready(model_of(PAIR), **({"ranges": RANGES} | changed))


def test_ranges_that_hold_all_shapes_are_fine() -> None:
    assert found() == []
    inputs = [
        Input(name="a", kind="tensor", dtype="float32", shape=("batch", "sequence")),
        Input(name="b", kind="tensor", dtype="float32", shape=("batch", 4)),
    ]
    assert found(inputs=inputs) == []


def declared(shape: tuple[int | str, ...], name: str = "a") -> list[Input]:
    return [Input(name=name, kind="tensor", dtype="float32", shape=shape)]


@pytest.mark.parametrize(
    ("given", "rule", "name", "got"),
    [
        ({"ranges": {"batch": (1, 8)}}, "range", "a", "'sequence', which has none"),
        ({"ranges": RANGES | {"batch": (-1, 8)}}, "range", "a", "-1 to 8"),
        ({"ranges": RANGES | {"batch": (1, 2**31)}}, "range", "a", "1 to 2147483648"),
        ({"ranges": RANGES | {"sequence": (64, 2)}}, "range", "a", "64 to 2"),
        ({"inputs": declared(("batch", 7))}, "inputs", "a", "['batch', 'sequence']"),
        ({"inputs": declared(("batch", 7), "z")}, "inputs", "z", "a, b"),
    ],
)
def test_what_does_not_fit_is_found(given: dict[str, Any], rule: str, name: str, got: str) -> None:
    violations = [v for v in found(**given) if v.rule != "volume"]  # endless ranges are that, too
    assert [(v.rule, v.node, v.got) for v in violations] == [(rule, name, got)]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("sequence", (2, 64)),
        ("2*sequence + 1", (5, 129)),
        ("(sequence - 1)//2 + 1", (1, 32)),
        ("batch*sequence", (2, 512)),
        ("64 - sequence", (0, 62)),
        ("Max(sequence, 16)", (16, 64)),
        ("ceiling(sequence/5)", (1, 13)),
        ("sequence % 4", (0, 3)),
        ("-sequence", (-64, -2)),
        ("sequence**2", (4, 4096)),
        ("floor(sequence/batch)", (0, 64)),
        ("u0", None),
        ("2*", None),
        ("sequence.real", None),
        ("sorted(sequence)", None),
        ("sequence/0", None),
    ],
)
def test_expressions_of_sizes(size: str, wanted: tuple[int, int] | None) -> None:
    assert bounds(ir.SymbolicDim(size), RANGES) == wanted
