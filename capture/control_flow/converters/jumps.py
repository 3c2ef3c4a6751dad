"""Remove the jumps of early returns, `break` and `continue`, so that both paths run to the end.

    if p:                   if p:
        return a      ->        return a
    rest                    else:
    return b                    rest
                                return b

In a loop, `break` sets a flag that the loop's test reads, and `return` another with the value.
"""

import ast
import copy
from collections.abc import Callable, Sequence

from enginecast.capture.control_flow.converters.expressions import assign, place_at, undefined
from enginecast.capture.control_flow.converters.liveness import LOOPS, blocks, walk
from enginecast.capture.python.recompile import OWN
from enginecast.errors import CaptureError

MOST_STATEMENTS = 5_000
"""Of a function without jumps: statements after nested ifs are copied into their paths."""
JUMPS = (ast.Return, ast.Break, ast.Continue)


class TooLarge(CaptureError):  # noqa: N818, a fact about a function and no fault of it
    """A function has so many paths that it would grow beyond bounds without jumps."""


class Jumps:
    """Takes the jumps out of one function; a loop that may end early names its flag (`over_of`)."""

    def __init__(self, is_candidate: Callable[[ast.For | ast.While], bool]) -> None:
        self._is_candidate = is_candidate
        self._count = 0
        self._statements = 0

    def function(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """The body, every path of which ends with `return` if a `return` is in an `if`."""
        settled = self._block(body)
        if falls(settled):
            settled.append(place_at(ast.Return(value=ast.Constant(value=None)), body[-1]))
        return self._settle(settled)

    def _block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """With the jumps out of loops taken away, innermost first."""
        result: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, ast.Try):
                result.append(statement)
                continue
            for block in blocks(statement):
                block[:] = self._block(block)
            if isinstance(statement, LOOPS) and self._is_candidate(statement):
                result += self._loop(statement)
            else:
                result.append(statement)
        return result

    def _loop(self, loop: ast.For | ast.While) -> list[ast.stmt]:
        found = jumps(loop.body)
        if not found:
            return [loop]
        self._count += 1
        flags = [f"{OWN}{word}_{self._count}" for word in ("over", "returned", "value")]
        over, returned, value = flags
        loop.body = self._flags(self._settle(loop.body), *flags)
        no = ast.Constant(value=False)
        before: list[ast.stmt] = []
        if any(isinstance(jump, ast.Break | ast.Return) for jump in found):
            loop.ec_over = over  # type: ignore[union-attr]  # an attribute survives a copy
            before = [assign(over, no)]
        after: list[ast.stmt] = []
        if any(isinstance(jump, ast.Return) for jump in found):
            before += [assign(returned, no), *undefined([value])]
            back = ast.Return(value=ast.Name(value, ast.Load()))
            after = [ast.If(test=ast.Name(returned, ast.Load()), body=[back], orelse=[])]
        for new in (*before, *after):
            place_at(new, loop)
        return [*before, loop, *after]

    def _settle(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """What comes after an `if` with a jump goes into its paths."""
        self._statements += len(body)
        if self._statements > MOST_STATEMENTS:
            raise TooLarge("the function has too many returns inside of branches")
        for place, statement in enumerate(body):
            if isinstance(statement, ast.With) and not falls(statement.body):
                statement.body = self._settle(statement.body)
            if isinstance(statement, ast.If) and jumps([statement]):
                rest = list(body[place + 1 :])
                for path in (statement.body, statement.orelse):
                    path[:] = self._settle([*path, *copy.deepcopy(rest)] if falls(path) else path)
                return [*body[:place], statement]
            if isinstance(statement, JUMPS):
                return [*body[: place + 1]]
        return list(body)

    def _flags(
        self, body: Sequence[ast.stmt], over: str, returned: str, value: str
    ) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        yes = ast.Constant(value=True)
        for node in body:
            if isinstance(node, ast.If):
                then = self._flags(node.body, over, returned, value)
                node.body = then or [place_at(ast.Pass(), node)]
                node.orelse = self._flags(node.orelse, over, returned, value)
            if isinstance(node, ast.Return):
                given = assign(value, node.value or ast.Constant(value=None))
                result += [place_at(given, node), place_at(assign(returned, yes), node)]
            if isinstance(node, ast.Break | ast.Return):
                result.append(place_at(assign(over, yes), node))
            elif not isinstance(node, ast.Continue):
                result.append(node)
        return result


def falls(body: Sequence[ast.stmt]) -> bool:
    """Whether control may come out at the end of `body`."""
    if not body:
        return True
    last = body[-1]
    if isinstance(last, ast.If):
        return falls(last.body) or falls(last.orelse)
    if isinstance(last, ast.With):
        return falls(last.body)
    return not isinstance(last, (*JUMPS, ast.Raise))


def jumps_out_of_blocks(body: Sequence[ast.stmt]) -> bool:
    """Whether there is a jump inside something else than `if`, such as `with` or `try`."""
    for node in body:
        if isinstance(node, ast.If):
            if jumps_out_of_blocks(node.body) or jumps_out_of_blocks(node.orelse):
                return True
        elif not isinstance(node, JUMPS) and jumps([node]):
            return True
    return False


def jumps(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Jumps that leave `body`: returns, and breaks of the loop that it belongs to."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, JUMPS):
            found.append(node)
        elif isinstance(node, LOOPS):
            found += [inner for inner in walk([node]) if isinstance(inner, ast.Return)]
        else:
            found += [jump for block in blocks(node) for jump in jumps(block)]
    return found
