"""The TensorRT gate: its rules, a graph that breaks each and one beside it that does not, and its
table, both asked of TensorRT-RTX where it is installed.
"""

import ast
import re

import onnx_ir as ir
import pytest
from harness import ROOT
from tensorrt_cases import CASES, FLOATS, Case, Constants
from tensorrt_graphs import model_of
from trt_gate.networks import first_signature, forms, signatures

from enginecast.exporters.tensorrt.gate.check import Violation, check_ready
from enginecast.exporters.tensorrt.gate.operators import table, type_variables, unsupported
from enginecast.exporters.tensorrt.gate.parser import check_parsed

RANGES = {"batch": (1, 8), "sequence": (1, 64), "k": (1, 3840)}
IDS = [f"{i}-{case.rule}" for i, case in enumerate(CASES)]
SAMPLE = ("ConvTranspose", "LayerNormalization", "NonZero", "Softmax", "TensorScatter", "TopK")
"""Operators that are asked anew by default."""


def found(text: str, constants: Constants, *, parsed: bool = False) -> list[Violation]:
    return check_ready(model_of(text, constants), ranges=RANGES, parsed=parsed)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_rule_finds_the_bad_graph_and_not_the_good_one(case: Case) -> None:
    assert found(case.good, case.constants) == []
    violations = found(case.bad, case.broken or case.constants)
    assert {violation.rule for violation in violations} == {case.rule}, violations
    assert case.got in str(violations[0])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_tensorrt_rtx_takes_the_good_graph_and_not_the_bad_one(case: Case) -> None:
    """The parser refuses it, or the builder, which the gate asks no parser about."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
    from trt_gate.ask import build, trt

    good, bad = (
        model_of(case.good, case.constants),
        model_of(case.bad, case.broken or case.constants),
    )
    assert build(ir.to_proto(good).SerializeToString()) == ""
    assert check_parsed(trt, good) == []
    assert bool(build(ir.to_proto(bad).SerializeToString())) is not case.narrowed
    # Where the parser takes it, the gate still says what the builder will.
    assert check_parsed(trt, bad) or found(case.bad, case.broken or case.constants, parsed=True)


def test_every_rule_has_a_case() -> None:
    """The names that the sources of the gate give to what they find, and those of the cases."""
    makers = {"at": 1, "of_value": 1, "_input": 1, "Violation": 0}
    named = set()
    for path in (ROOT / "exporters/tensorrt/gate").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r'": "([\w-]+)"', text.partition("_RULES")[2].partition('"""')[0]))
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                position = makers.get(call.func.id)
                given = call.args[position] if position is not None and call.args[1:] else None
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    named.add(given.value)
    elsewhere = {"range", "inputs", "volume", "parser"}  # test_tensorrt_shapes, and below
    assert named == {case.rule for case in CASES} - {"attribute"} | elsewhere


def test_a_violation_names_node_module_and_line() -> None:
    violation = found(f"{FLOATS} {{ y = com.microsoft.Gelu(x) }}", {})[0]
    assert str(violation) == (
        "'node_y' (com.microsoft::Gelu, module 'layer.1', model.py:12): expected an operator that"
        f" {table().library} takes, got an operator of the domain com.microsoft [operator]"
    )


def test_the_parser_names_node_module_and_line_without_the_weights() -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")

    def computed() -> ir.TensorProtocol:
        raise AssertionError("a weight was computed")

    body = "{ v = MatMul(x, a) z = MatMul(v, b) y = OP(z) }"
    graph = f"(float[batch, 512] x) => (float[batch, 600] y) {body}"
    constants = {name: ([[1.0]], ir.DataType.FLOAT) for name in "ab"}
    for op, wanted in (
        ("Relu", []),
        (
            "Det",
            [
                "'node_y' (Det, module 'layer.1', model.py:12): expected what TensorRT-RTX"
                f" {trt.__version__} parses, got no importer [parser]"
            ],
        ),
    ):
        model = model_of(graph.replace("OP", op), constants)
        for name, columns in (("a", 512), ("b", 600)):
            shape = ir.Shape([512, columns])
            model.graph.initializers[name].shape = shape
            model.graph.initializers[name].const_value = ir.LazyTensor(
                computed, dtype=ir.DataType.FLOAT, shape=shape, name=name
            )
        assert list(map(str, check_parsed(trt, model) or ())) == wanted


def test_the_table_has_every_operator_that_is_asked() -> None:
    assert list(table().operators) == sorted(forms())
    for op, answer in table().operators.items():
        choices = [product.split(";") for product in answer.takes]
        assert all(len(each) == max(len(type_variables(op)), 1) for each in choices), op
        assert first_signature(op) in signatures(op)
    assert unsupported("", "RoiAlign", plugins=True) == ""
    assert "plugin was not found" in unsupported("", "RoiAlign")
    assert unsupported("", "ImageDecoder") == "not asked"


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=[pytest.mark.slow] * (op not in SAMPLE)) for op in sorted(forms())],
)
def test_the_table_is_what_the_installed_tensorrt_rtx_answers(op: str) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
    from trt_gate.ask import LIBRARY
    from trt_gate.run import examine

    if table().library != LIBRARY:
        pytest.skip(f"the table is of {table().library}, and {LIBRARY} is installed")
    row, known = examine(op), table().operators[op]
    assert (tuple(row.takes), {k: tuple(v) for k, v in row.refused.items()}) == (
        *(known.takes, known.refused),
    )
