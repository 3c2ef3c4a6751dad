"""What statements do to the names of a frame, and which of them decide."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from enginecast.capture.taint import (
    CLEAN,
    Value,
    constant,
    element,
    is_plain,
    truth,
)
from enginecast.capture.taint_branches import joined, meet_again, narrow
from enginecast.capture.taint_builtins import count_of, elements
from enginecast.capture.taint_expressions import combine
from enginecast.capture.taint_frame import Frame
from enginecast.capture.taint_naming import NAMING
from enginecast.capture.taint_places import bind

Outcome = frozenset[str]
NEXT: Outcome = frozenset({"next"})
"""Ways out of statements: to the next one, or by break, continue, or the end of the function."""
END: Outcome = frozenset({"end"})
LOOP_PASSES = 2
"""How often the body of a loop is walked through, where its elements are not known one by one."""


def execute(statements: list[ast.stmt], frame: Frame) -> Outcome:
    """Walk through statements; what follows a sure return or break is not reached."""
    ways: Outcome = frozenset()
    for statement in statements:
        handler = _HANDLERS.get(type(statement))
        outcome = NEXT if handler is None else handler(statement, frame)
        ways |= outcome - NEXT
        if "next" not in outcome:
            return ways
    return ways | NEXT


def _expression(node: ast.Expr, frame: Frame) -> Outcome:
    frame.evaluate(node.value)
    return NEXT


def _return(node: ast.Return, frame: Frame) -> Outcome:
    frame.returns.append(constant(None) if node.value is None else frame.evaluate(node.value))
    return END


def _raise(node: ast.Raise, frame: Frame) -> Outcome:
    was_quiet, frame.is_quiet = frame.is_quiet, True
    frame.evaluate(node.exc)
    frame.is_quiet = was_quiet
    return END


def _assign(node: ast.Assign, frame: Frame) -> Outcome:
    value = frame.evaluate(node.value)
    for target in node.targets:
        bind(target, value, frame)
    return NEXT


def _annotated(node: ast.AnnAssign, frame: Frame) -> Outcome:
    if node.value is not None:
        bind(node.target, frame.evaluate(node.value), frame)
    return NEXT


def _augmented(node: ast.AugAssign, frame: Frame) -> Outcome:
    target = node.target
    load = ast.copy_location(_as_load(target), target)
    old, new = frame.evaluate(load), frame.evaluate(node.value)
    made = combine(node.op, old, new)
    if isinstance(target, ast.Name):
        if old.owner:
            frame.meet("state", node, old, blocking=True)
            frame.walk.write_state(None, old.owner)
        frame.names[target.id] = replace(made, owner=old.owner)
    else:
        bind(target, replace(made, owner=""), frame)
    return NEXT


def _as_load(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    assert isinstance(target, ast.Subscript)
    return ast.Subscript(target.value, target.slice, ast.Load())


def _if(node: ast.If, frame: Frame) -> Outcome:
    test = frame.evaluate(node.test)
    known = truth(test)
    if known is not None:
        return execute(node.body if known else node.orelse, frame)
    if test.is_data or not _only_checks(node):
        frame.decide("if", node, node.test, test)
    before = dict(frame.names)
    narrow(node.test, frame, holds=True)
    taken = execute(node.body, frame)
    names, frame.names = frame.names, dict(before)
    narrow(node.test, frame, holds=False)
    other = execute(node.orelse, frame)
    meet_again(frame, before, (names, taken), (frame.names, other), test)
    return taken | other


def _only_checks(node: ast.If) -> bool:
    """Whether an `if` does nothing but raise, or warn."""
    return not node.orelse and all(
        isinstance(each, ast.Raise | ast.Pass)
        or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Call | ast.Constant))
        for each in node.body
    )


def _for(node: ast.For, frame: Frame) -> Outcome:
    source = frame.evaluate(node.iter)
    known = elements(source)
    if known is not None:
        outcome = _unrolled(node, known, frame)
    else:
        count = count_of(source)
        if count is not None:
            frame.decide("for", node, node.iter, count)
        outcome = _repeated(node.body, frame, lambda: bind(node.target, element(source), frame))
    return _after_loop(outcome, node.orelse, frame)


def _unrolled(node: ast.For, known: list[Value], frame: Frame) -> Outcome:
    ways: Outcome = frozenset()
    for each in known:
        before = dict(frame.names)
        bind(node.target, each, frame)
        outcome = execute(node.body, frame)
        ways |= outcome
        if not outcome & {"next", "continue"}:
            if outcome <= END:
                frame.names = before
            return ways - {"next"} if outcome <= END else ways
        if "break" in outcome:
            frame.names = joined(before, frame.names)
    return ways | NEXT


def _repeated(body: list[ast.stmt], frame: Frame, start: Callable[[], None]) -> Outcome:
    ways: Outcome = NEXT
    for _ in range(LOOP_PASSES):
        before = dict(frame.names)
        start()
        ways |= execute(body, frame)
        frame.names = joined(before, frame.names)
    return ways


def _while(node: ast.While, frame: Frame) -> Outcome:
    ways: Outcome = frozenset()
    can_end = False
    for _ in range(LOOP_PASSES):
        test = frame.evaluate(node.test)
        known = truth(test)
        can_end = can_end or known is not True
        if known is False:
            break
        if known is None:
            frame.decide("while", node, node.test, test)
        before = dict(frame.names)
        ways |= execute(node.body, frame)
        frame.names = joined(before, frame.names)
    if not can_end:
        ways -= NEXT
    return _after_loop(ways | NEXT if can_end else ways, node.orelse, frame)


def _after_loop(ways: Outcome, orelse: list[ast.stmt], frame: Frame) -> Outcome:
    after = ways - {"break", "continue", "next"}
    if ways & {"break", "continue", "next"}:
        after |= NEXT
        if orelse and "next" in ways:
            after |= execute(orelse, frame)
    return after


def _assert(node: ast.Assert, frame: Frame) -> Outcome:
    test = frame.evaluate(node.test)
    if test.is_data:
        frame.decide("assert", node, node.test, test)
    return NEXT


def _try(node: ast.Try, frame: Frame) -> Outcome:
    before = dict(frame.names)
    frame.tries += bool(node.handlers)
    returned = len(frame.returns)
    ways = execute(node.body, frame)
    frame.tries -= bool(node.handlers)
    results = frame.returns[returned:]
    if ways == END and results and all(map(is_plain, results)):
        return ways  # what was computed did not raise
    if "next" in ways:
        ways = (ways - NEXT) | execute(node.orelse, frame)
    after = frame.names if ways - END else None
    for handler in node.handlers:
        frame.names = joined(before, after or before)
        if handler.name:
            frame.names[handler.name] = CLEAN
        outcome = execute(handler.body, frame)
        ways |= outcome
        if outcome - END:
            after = frame.names if after is None else joined(after, frame.names)
    frame.names = after or before
    if node.finalbody:
        ended = execute(node.finalbody, frame)
        ways = ways if "next" in ended else ended
    return ways


def _with(node: ast.With | ast.AsyncWith, frame: Frame) -> Outcome:
    for item in node.items:
        value = frame.evaluate(item.context_expr)
        if item.optional_vars is not None:
            bind(item.optional_vars, value, frame)
    return execute(node.body, frame)


def _match(node: ast.Match, frame: Frame) -> Outcome:
    subject = frame.evaluate(node.subject)
    frame.decide("if", node, node.subject, subject)
    before, ways = dict(frame.names), NEXT
    for case in node.cases:
        names, frame.names = frame.names, dict(before)
        if case.guard is not None:
            frame.decide("if", case.guard, case.guard, frame.evaluate(case.guard))
        ways |= execute(case.body, frame)
        frame.names = joined(names, frame.names)
    return ways


_HANDLERS: Mapping[type[ast.stmt], Callable[[Any, Frame], Outcome]] = {
    ast.Expr: _expression,
    ast.Return: _return,
    ast.Raise: _raise,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _for,
    ast.AsyncFor: _for,
    ast.While: _while,
    ast.Assert: _assert,
    ast.Try: _try,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.Match: _match,
    **NAMING,
    ast.Break: lambda node, frame: frozenset({"break"}),
    ast.Continue: lambda node, frame: frozenset({"continue"}),
}
