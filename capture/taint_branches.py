"""Names before and after a branch: what a test says of them, and what two ways make of them."""

import ast
from dataclasses import replace

from enginecast.capture.taint import CLEAN, Value, constant, depending, join
from enginecast.capture.taint_frame import Frame

END = frozenset({"end"})


def narrow(test: ast.expr, frame: Frame, *, holds: bool) -> None:
    """Within `if x is None`, x is None; elsewhere it is not."""
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name):
        return
    if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Is | ast.IsNot):
        return
    against = test.comparators[0]
    value = frame.names.get(test.left.id)
    if not isinstance(against, ast.Constant) or against.value is not None or value is None:
        return
    is_none = isinstance(test.ops[0], ast.Is) == holds
    if value.optional:
        narrowed = constant(None) if is_none else replace(value, optional=False)
        frame.names[test.left.id] = narrowed


def meet_again(
    frame: Frame,
    before: dict[str, Value],
    taken: tuple[dict[str, Value], frozenset[str]],
    other: tuple[dict[str, Value], frozenset[str]],
    test: Value,
) -> None:
    """Names after two branches; a branch that ends the function leaves none."""
    going = [names for names, outcome in (taken, other) if outcome - END]
    if len(going) < 2:
        frame.names = going[0] if going else before
        return
    left, right = going
    frame.names = {
        name: _either(left.get(name), right.get(name), test) for name in {**left, **right}
    }


def _either(left: Value | None, right: Value | None, test: Value) -> Value:
    if left is None or right is None:
        return depending(left or right or CLEAN, test)
    if left is right:
        return left
    return depending(join(left, right), test)


def joined(left: dict[str, Value], right: dict[str, Value]) -> dict[str, Value]:
    """Names after one of two ways, of which nothing decides."""
    return {name: _either(left.get(name), right.get(name), CLEAN) for name in {**left, **right}}
