"""The rules of the TensorRT gate: a graph that breaks each, and one beside it that does not."""

import ast
import re
from pathlib import Path

import pytest
from tensorrt_cases import CASES, FLOATS, Case, Constants
from tensorrt_graphs import E5M2, model_of

from enginecast.errors import UsageError
from enginecast.exporters.tensorrt.gate.check import SHOWN, Violation, check_ready, refusal_of

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


def test_an_error_lists_the_first_violations_and_counts_the_rest() -> None:
    count = SHOWN + 2
    steps = " ".join(f"v{i + 1} = com.microsoft.Gelu(v{i})" for i in range(count))
    text = f"(float[batch] v0) => (float[batch] v{count}) {{ {steps} }}"
    model = model_of(text)
    error = refusal_of(check_ready(model, version="11.0", ranges=RANGES), "11.0")
    lines = error.message.splitlines()
    assert lines[0] == "TensorRT 11.0 does not take this network: 12 violations"
    assert len(lines) == SHOWN + 2
    assert "'node_v10'" in lines[SHOWN]
    assert lines[-1] == "  and 2 more"
    assert len(error.details["violations"]) == count


def test_a_type_that_the_graph_does_not_say_is_a_violation() -> None:
    model = model_of(f"{FLOATS} {{ z = Relu(x) y = Neg(z) }}")
    model.graph[0].outputs[0].type = None
    violations = check_ready(model, ranges=RANGES)
    assert {(v.rule, v.got) for v in violations} == {("types", "no element type of z")}


def test_e5m2_weights_are_found_where_nothing_reads_them_as_fp8() -> None:
    """They are not element types of TensorRT at all."""
    model = model_of(f"{FLOATS} {{ y = Relu(x) }}", {"w": ([1.0, 2.0], E5M2)})
    assert [violation.rule for violation in check_ready(model, ranges=RANGES)] == ["fp8-format"]


def test_an_input_of_a_type_that_tensorrt_lacks_is_found_where_nothing_reads_it() -> None:
    model = model_of("(float[batch] x, int16[batch] z) => (float[batch] y) { y = Relu(x) }")
    violations = check_ready(model, ranges=RANGES)
    assert [(v.rule, v.node, v.got) for v in violations] == [("types", "z", "INT16")]
