"""Every op of ours has one rule for each target that meets it, or a sentence that says why not."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from enginecast.exporters.onnx.ops.registry import FORMS, READERS
from enginecast.exporters.tensorrt.torch_converters import CONVERTERS
from enginecast.ops.rules import Rules
from enginecast.ops.traits import OWN, Family
from enginecast.passes.lower import decompose_fused, decompose_quantized
from enginecast.verification.emulate.kernels import KERNELS, QUANTIZED


def unanswered(
    ops: Collection[Any], rules: Collection[Any], refused: Mapping[Any, str]
) -> tuple[list[Any], list[Any]]:
    """Ops with neither a rule nor a reason, and ops with both."""
    neither = [op for op in ops if op not in rules and not refused.get(op)]
    return neither, [op for op in refused if op in rules]


def ops_for(family: Family | None) -> list[Any]:
    """Those that a program may hold when it comes to an exporter."""
    return [op for op, own in OWN.items() if own.form_of in (None, family)]


@pytest.mark.parametrize("reader", READERS)
def test_onnx(reader: Any) -> None:
    rules = FORMS[reader]
    assert unanswered(ops_for("onnx"), rules, rules.refused) == ([], [])


def test_tensorrt_by_torch() -> None:
    assert unanswered(ops_for("tensorrt"), CONVERTERS, CONVERTERS.refused) == ([], [])


def test_plain_ops_for_inductor() -> None:
    rules = {*decompose_fused.RULES, *decompose_quantized.FORMS}
    assert unanswered(ops_for(None), rules, {}) == ([], [])


def test_the_emulator() -> None:
    rules = {*KERNELS, *QUANTIZED}
    assert unanswered(list(OWN), rules, KERNELS.refused) == ([], [])


def test_an_op_without_a_rule_is_found_out() -> None:
    rules: Rules[Callable[..., Any]] = Rules()
    first, second, third = list(OWN)[:3]
    rules.rule(first)(print)
    rules.refuse(second, reason="for a reason")
    assert unanswered([first, second, third], rules, rules.refused) == ([third], [])
    rules.refuse(first, reason="and yet")
    assert unanswered([first], rules, rules.refused) == ([], [first])
