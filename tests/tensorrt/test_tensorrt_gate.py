"""The rules of the TensorRT gate: a graph that breaks each, and one beside it that does not."""

import ast
import re
from pathlib import Path

import pytest
from tensorrt_cases import CASES, FLOATS, Case, Constants
from tensorrt_graphs import model_of

from enginecast.errors import UsageError
from enginecast.exporters.tensorrt.gate.check import Violation, check_ready

RANGES = {"batch": (1, 8), "sequence": (1, 64)}
GATE = Path(__file__).parents[2] / "exporters/tensorrt/gate"


def found(text: str, constants: Constants, version: str = "10.15") -> list[Violation]:
    opset = 24 if "Swish" in text else 23
    return check_ready(model_of(text, constants, opset=opset), version=version, ranges=RANGES)


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.rule}" for i, case in enumerate(CASES)])
def test_a_rule_finds_the_bad_graph_and_not_the_good_one(case: Case) -> None:
    assert found(case.good, case.constants) == []
    violations = found(case.bad, case.broken or case.constants)
    assert {violation.rule for violation in violations} == {case.rule}, violations
    assert case.got in str(violations[0])


def test_every_rule_has_a_case() -> None:
    """The names that the sources of the gate give to what they find, and those of the cases."""
    makers = {"at": 1, "of_value": 1, "_input": 1, "Violation": 0}
    named = set()
    for path in GATE.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                position = makers.get(call.func.id)
                given = call.args[position] if position is not None and call.args[1:] else None
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    named.add(given.value)
    in_shapes = {"opset", "range", "inputs", "volume"}
    assert named == {case.rule for case in CASES} | in_shapes  # the latter: test_tensorrt_shapes


def test_a_violation_names_node_module_and_line() -> None:
    violation = found(f"{FLOATS} {{ y = com.microsoft.Gelu(x) }}", {})[0]
    assert str(violation) == (
        "'node_y' (com.microsoft::Gelu, module 'layer.1', model.py:12): expected operators of"
        " ONNX's own domain, got an operator of the domain com.microsoft [domain]"
    )


@pytest.mark.parametrize("version", ["11.0", "11.0.0.114", "12.3"])
def test_a_newer_parser_takes_what_it_is_documented_to_take(version: str) -> None:
    assert found(f"{FLOATS} {{ y = Swish(x) }}", {}, version) == []


@pytest.mark.parametrize(
    ("version", "opset", "got"), [("11.0", 25, "25"), ("11.0", 8, "8"), ("11.5", 26, "26")]
)
def test_an_opset_outside_of_the_parser_s_is_found(version: str, opset: int, got: str) -> None:
    model = model_of(f"{FLOATS} {{ y = Relu(x) }}")
    model.opset_imports[""] = opset
    violations = check_ready(model, version=version, ranges=RANGES)
    assert [(violation.rule, violation.got) for violation in violations] == [("opset", got)]
    model.opset_imports[""] = 25 if version == "11.5" else 24
    assert check_ready(model, version=version, ranges=RANGES) == []


@pytest.mark.parametrize(
    ("version", "reported"), [("10.9", "10.15 or newer"), ("new", "such as 11.0")]
)
def test_an_unknown_version_is_refused(version: str, reported: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reported)):
        found(f"{FLOATS} {{ y = Relu(x) }}", {}, version)
