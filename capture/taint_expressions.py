"""What each kind of Python expression gives."""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from enginecast.capture.taint import (
    CLEAN,
    Value,
    constant,
    depending,
    guess,
    is_plain,
    join,
    mix,
    scalar,
    sequence,
    tensor_from,
    truth,
)
from enginecast.capture.taint_builtins import elements
from enginecast.capture.taint_containers import CONTAINERS
from enginecast.capture.taint_frame import Frame, Local
from enginecast.capture.taint_tensors import tensor_attribute

BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}
COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
SMALL = 2**63


def evaluate(node: ast.expr, frame: Frame) -> Value:
    """What `node` gives in `frame`."""
    handler = _HANDLERS.get(type(node))
    if handler is not None:
        return handler(node, frame)
    children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return mix([frame.evaluate(child) for child in children])


def _name(node: ast.Name, frame: Frame) -> Value:
    found = frame.lookup(node.id)
    if found is not None:
        return found
    if node.id in frame.globals:
        return constant(frame.globals[node.id])
    builtins = frame.globals.get("__builtins__", {})
    table = builtins if isinstance(builtins, dict) else vars(builtins)
    return Value(const=table[node.id]) if node.id in table else CLEAN


def _attribute(node: ast.Attribute, frame: Frame) -> Value:
    base = frame.evaluate(node.value)
    return attribute_of(base, node.attr, frame)


def attribute_of(base: Value, name: str, frame: Frame) -> Value:
    """`base.name`."""
    if base.fields is not None and name in base.fields:
        return base.fields[name]
    if base.is_known and not isinstance(base.const, Tensor):
        return frame.attribute(base, name) or CLEAN
    if base.tensor and base.items is None and base.fields is None and not base.many:
        return tensor_attribute(base, name)
    return guess((base,))


def _binary(node: ast.BinOp, frame: Frame) -> Value:
    left, right = frame.evaluate(node.left), frame.evaluate(node.right)
    return combine(node.op, left, right)


def combine(op: ast.operator, left: Value, right: Value) -> Value:
    """`left op right`."""
    if is_plain(left) and is_plain(right):
        return _computed(BINARY.get(type(op)), left.const, right.const)
    if isinstance(op, ast.BitOr) and (left.const is True or right.const is True):
        return constant(True)
    if left.items is not None and right.items is not None and isinstance(op, ast.Add):
        return sequence((*left.items, *right.items))
    is_sequence = any(v.items is not None or v.many for v in (left, right))
    made = mix((left, right))
    if is_sequence:
        return replace(made, many=True)
    if made.tensor:
        is_mask = isinstance(op, ast.BitAnd | ast.BitOr | ast.BitXor) and left.mask and right.mask
        return replace(tensor_from((left, right)), mask=is_mask)
    return made


def _computed(function: Callable[[Any, Any], Any] | None, left: Any, right: Any) -> Value:
    """A small sum of numbers; a text or a number may be too large to compute in passing."""
    sizes = [len(v) if isinstance(v, str | bytes) else v for v in (left, right)]
    if function is None or not all(isinstance(v, int | float) and abs(v) < SMALL for v in sizes):
        return CLEAN
    if function is operator.mul and any(isinstance(v, str | bytes) for v in (left, right)):
        return CLEAN
    try:
        return constant(function(left, right))
    except (TypeError, ValueError, ArithmeticError):
        return CLEAN


def _unary(node: ast.UnaryOp, frame: Frame) -> Value:
    value = frame.evaluate(node.operand)
    if isinstance(node.op, ast.Not):
        known = truth(value)
        if known is not None:
            return constant(not known)
        if value.is_data and not value.read:
            frame.meet("boolean", node, value, blocking=True)
            return Value(labels=value.labels, read=True)
        return scalar((value,))
    if isinstance(value.const, int | float):
        return constant(-value.const) if isinstance(node.op, ast.USub) else CLEAN
    return value if value.tensor or value.read else scalar((value,))


def _boolean(node: ast.BoolOp, frame: Frame) -> Value:
    is_and = isinstance(node.op, ast.And)
    values: list[Value] = []
    for index, operand in enumerate(node.values):
        value = frame.evaluate(operand)
        known = truth(value)
        if known is not None and known != is_and:  # it ends here
            return value if not values else scalar((*values, value)) if is_and else mix(values)
        is_last = index == len(node.values) - 1
        if known is not None:
            if is_last:
                return value if not values else mix((*values, value))
            continue
        if not is_last and value.is_data and not value.read:
            frame.meet("boolean", node, value, blocking=True, shown=operand)
        values.append(value)
    if len(values) == 1:
        return values[0]
    made = mix(values)
    return replace(made, optional=any(v.optional for v in values))


def _compare(node: ast.Compare, frame: Frame) -> Value:
    values = [frame.evaluate(each) for each in (node.left, *node.comparators)]
    if len(node.ops) == 1:
        return _one_comparison(node, node.ops[0], *values)
    made = mix(values)
    is_data = any(value.is_data for value in values)
    if is_data and made.tensor:  # a < b < c asks for the truth of a < b
        frame.meet("boolean", node, made, blocking=True)
    return replace(made, tensor=False, read=is_data)


def _one_comparison(node: ast.Compare, op: ast.cmpop, left: Value, right: Value) -> Value:
    if isinstance(op, ast.Is | ast.IsNot):
        same = _is_same(left, right)
        if same is None:
            return CLEAN
        return constant(same == isinstance(op, ast.Is))
    function = COMPARE.get(type(op))
    if function is not None and _is_comparable(left) and _is_comparable(right):
        try:
            return constant(bool(function(left.const, right.const)))
        except (TypeError, ValueError):
            return CLEAN
    known = elements(right) if isinstance(op, ast.In | ast.NotIn) else None
    if known is not None and left.is_known and all(_is_comparable(each) for each in known):
        return constant((left.const in [each.const for each in known]) == isinstance(op, ast.In))
    made = mix((left, right))
    if isinstance(op, ast.In | ast.NotIn):
        return replace(made, tensor=left.is_one_tensor or right.is_one_tensor)
    if left.const is None or right.const is None:
        return CLEAN
    return replace(made, mask=made.tensor)


def _is_comparable(value: Value) -> bool:
    kinds = (tuple, list, dict, set, frozenset, type)
    return is_plain(value) or (value.is_known and isinstance(value.const, kinds))


def _is_same(left: Value, right: Value) -> bool | None:
    if left.is_known and right.is_known:
        if is_plain(left) and is_plain(right):
            return type(left.const) is type(right.const) and bool(left.const == right.const)
        return left.const is right.const
    for value, other in ((left, right), (right, left)):
        is_there = other.is_one_tensor or other.items is not None or other.fields is not None
        if value.const is None and is_there and not other.optional:
            return False
    return None


def _ternary(node: ast.IfExp, frame: Frame) -> Value:
    test = frame.evaluate(node.test)
    known = truth(test)
    if known is not None:
        return frame.evaluate(node.body if known else node.orelse)
    frame.decide("ternary", node, node.test, test)
    made = join(frame.evaluate(node.body), frame.evaluate(node.orelse))
    return depending(made, test)


def _walrus(node: ast.NamedExpr, frame: Frame) -> Value:
    value = frame.evaluate(node.value)
    frame.names[node.target.id] = value
    return value


def _text(node: ast.JoinedStr, frame: Frame) -> Value:
    """What a text shows of a tensor decides nothing; `print` looks at its own arguments."""
    values = [
        frame.evaluate(part.value) for part in node.values if isinstance(part, ast.FormattedValue)
    ]
    texts = [each.value if isinstance(each, ast.Constant) else None for each in node.values]
    if all(is_plain(value) for value in values) and not any(map(_is_formatted, node.values)):
        shown = iter(values)
        return constant("".join(str(next(shown).const if t is None else t) for t in texts))
    return scalar(values)


def _is_formatted(part: ast.expr) -> bool:
    return isinstance(part, ast.FormattedValue) and (
        part.format_spec is not None or part.conversion != -1
    )


_HANDLERS: Mapping[type[ast.expr], Callable[[Any, Frame], Value]] = {
    ast.Constant: lambda node, frame: constant(node.value),
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.BoolOp: _boolean,
    ast.Compare: _compare,
    ast.IfExp: _ternary,
    ast.NamedExpr: _walrus,
    ast.JoinedStr: _text,
    ast.Lambda: lambda node, frame: Value(const=Local(node, frame)),
    ast.Call: lambda node, frame: frame.walk.call_node(node, frame),
    **CONTAINERS,
}
