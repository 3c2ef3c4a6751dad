"""Which ways the branches and loops of a model's code were taken, run by run.

The tests of `if`, `while` and conditional expressions, the iterables of `for`, and the ends of
`try` are wrapped where they stand in the source; the wrapped code runs for the time of a `with`
block.
"""

import ast
import gc
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Literal

from torch import Tensor, nn

from enginecast.capture.control_flow.detect.statements import entered
from enginecast.capture.python.locations import SourceLocation, line_numbers, real_path
from enginecast.capture.python.recompile import SourceUnavailable, first_line, source_of, swapped

Form = Literal["branch", "loop", "try"]
WATCH = "_enginecast_watch"


@dataclass(frozen=True)
class Predicate:
    """One test or loop in the source."""

    place: SourceLocation
    column: int
    form: Form
    code: str
    """Source of the test, of what the loop runs over, or of the first line that is tried."""


@dataclass
class Ways:
    """The ways that were seen: True and False of a branch, numbers of rounds of a loop, 0 of what
    was tried, and 1 where it raised.
    """

    seen: dict[Predicate, set[int]] = field(default_factory=dict)
    passed: set[Predicate] = field(default_factory=set)
    """Tests that a dtype decided, so that what they ask of values was not asked."""

    def open(self) -> list[Predicate]:
        """Predicates of which only one way was seen; those never reached are not among them."""
        return [predicate for predicate, ways in self.seen.items() if len(ways) < 2]

    def add(self, other: "Ways") -> bool:
        """Take over what another run saw; whether anything was new."""
        is_new = False
        self.passed |= other.passed
        for predicate, ways in other.seen.items():
            known = self.seen.setdefault(predicate, set())
            # A third number of rounds proves nothing more.
            if len(known) < 2 and ways - known:
                known |= ways
                is_new = True
        return is_new

    def told(self, predicate: Predicate) -> str:
        """What was seen of a predicate that is open, in words."""
        [way] = self.seen[predicate]
        if predicate.form == "branch":
            return f"was always {bool(way)}"
        if predicate.form == "try":
            return "never raised"
        return f"always went {way} round{'' if way == 1 else 's'}"


@dataclass(frozen=True)
class Coverage:
    """Predicates at some places of a model's code, ready to be watched.

    Args:
        definitions: by function, its definition with wrapped tests.
        predicates: by number, as the wrapped tests know them.
        unseen: places without a readable source.
    """

    definitions: Mapping[FunctionType, ast.FunctionDef]
    predicates: tuple[Predicate, ...]
    unseen: tuple[SourceLocation, ...] = ()

    @contextmanager
    def watched(self) -> Iterator[Ways]:
        """Within the block, runs of the model add to the ways that are yielded."""
        ways = Ways()
        with _watching(self.predicates, ways), swapped(self.definitions):
            yield ways


def find_predicates(
    module: nn.Module, inputs: Mapping[str, Tensor], places: Collection[SourceLocation]
) -> Coverage:
    """The predicates at `places`, in functions that a run of `module` enters.

    Args:
        module: with real weights; it is run once.
        inputs: what it is run on.
        places: file and line; a test that goes over several lines counts with each of them.
    """
    definitions: dict[FunctionType, ast.FunctionDef] = {}
    predicates: list[Predicate] = []
    found: set[SourceLocation] = set()
    for function in _functions(entered(module, inputs), places):
        try:
            source = source_of(function)
        except SourceUnavailable:
            continue
        lines = {line for file, line in places if file == real_path(source.file)}
        wrap = _Wrap(real_path(source.file), lines, predicates)
        definition = source.definition
        # A line that reads a value and tests none has one way.
        span = range(first_line(definition), (definition.end_lineno or 0) + 1)
        found |= {SourceLocation(wrap.file, line) for line in lines if line in span}
        definitions[source.function] = wrap.visit(definition)
    return Coverage(definitions, tuple(predicates), tuple(sorted(set(places) - found)))


def _functions(
    codes: Collection[CodeType], places: Collection[SourceLocation]
) -> list[FunctionType]:
    """The functions whose code holds one of `places`."""
    found: dict[int, FunctionType] = {}
    for code in codes:
        file = real_path(code.co_filename)
        lines = [*line_numbers(code)] or [0]
        if not any(f == file and min(lines) <= n <= max(lines) for f, n in places):
            continue
        for owner in gc.get_referrers(code):
            if isinstance(owner, FunctionType) and owner.__code__ is code:
                found[id(owner)] = owner
    return list(found.values())


class _Wrap(ast.NodeTransformer):
    """Wraps the tests and iterables on some lines of one function."""

    def __init__(self, file: str, lines: Collection[int], predicates: list[Predicate]) -> None:
        self.file = file
        self._lines = lines
        self._predicates = predicates

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.body[-1], ast.Raise):  # the other way is an error: nothing to compare
            self.generic_visit(node)
            return node
        return self._with_test(node, "branch")

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._with_test(node, "branch")

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._with_test(node, "loop")

    def visit_Try(self, node: ast.Try) -> ast.AST:
        lines = {n for part in node.body for n in self._own(part)}
        code = ast.unparse(node.body[0])
        self.generic_visit(node)
        if lines and node.handlers:
            taken = self._add(node, "try", code)
            node.body.insert(0, self._noted(node, taken, 0))
            for handler in node.handlers:
                handler.body.insert(0, self._noted(handler, taken, 1))
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        lines = self._own(node.iter)
        self.generic_visit(node)
        if lines:
            node.iter = self._call("rounds", node.iter, "loop")
        return node

    def _with_test(self, node: ast.If | ast.IfExp | ast.While, form: Form) -> ast.AST:
        lines = self._own(node.test)
        self.generic_visit(node)
        asked = asked_of_dtypes(node.test)
        if lines and asked is not None and form == "branch":
            dtypes, rest = asked
            number = self._add(node.test, form, ast.unparse(node.test))
            values = _watch(f"branch({number})", node.test)
            values.args.append(rest)
            passed = _watch(f"passed({number})", node.test)
            node.test = ast.copy_location(ast.IfExp(dtypes, values, passed), node.test)
        # `while True` has one way: its breaks decide.
        elif lines and not isinstance(node.test, ast.Constant):
            node.test = self._call("branch" if form == "branch" else "again", node.test, form)
        return node

    def _own(self, test: ast.expr | ast.stmt) -> set[int]:
        """The wanted lines that a test or statement stands on."""
        last = test.end_lineno or test.lineno
        return {line for line in self._lines if test.lineno <= line <= last}

    def _add(self, node: ast.expr | ast.stmt, form: Form, code: str) -> int:
        self._predicates.append(
            Predicate(SourceLocation(self.file, node.lineno), node.col_offset, form, code)
        )
        return len(self._predicates) - 1

    def _call(self, method: str, test: ast.expr, form: Form) -> ast.expr:
        number = self._add(test, form, ast.unparse(test))
        call = _watch(f"{method}({number})", test)
        call.args.append(test)
        return call

    def _noted(self, node: ast.stmt | ast.excepthandler, number: int, way: int) -> ast.stmt:
        return ast.copy_location(ast.Expr(_watch(f"note({number}, {way})", node)), node)


def _watch(call: str, place: ast.AST) -> ast.Call:
    """A call of the innermost `_Watch`, at the line of `place`."""
    watch = f"__import__('enginecast.capture.control_flow.cover.coverage', fromlist=['']).{WATCH}"
    made = ast.parse(f"{watch}[-1].{call}", mode="eval").body
    assert isinstance(made, ast.Call)
    for part in ast.walk(made):
        ast.copy_location(part, place)
    return made


class _Watch:
    """What wrapped code calls."""

    def __init__(self, predicates: tuple[Predicate, ...], ways: Ways) -> None:
        self._predicates = predicates
        self._ways = ways
        self._rounds: dict[int, int] = {}

    def branch(self, number: int, test: Any) -> bool:
        value = bool(test)
        self.note(number, int(value))
        return value

    def passed(self, number: int) -> bool:
        self._ways.passed.add(self._predicates[number])
        return False

    def again(self, number: int, test: Any) -> bool:
        value = bool(test)
        self._rounds[number] = self._rounds.get(number, 0) + value
        if not value:
            self.note(number, self._rounds.pop(number))
        return value

    def rounds(self, number: int, iterable: Any) -> Iterator[Any]:
        count = 0
        try:
            for item in iterable:
                count += 1
                yield item
        finally:  # also when the loop is left with a break
            self.note(number, count)

    def note(self, number: int, way: int) -> None:
        self._ways.seen.setdefault(self._predicates[number], set()).add(way)


_enginecast_watch: list[_Watch] = []


@contextmanager
def _watching(predicates: tuple[Predicate, ...], ways: Ways) -> Iterator[None]:
    with ExitStack() as stack:
        _enginecast_watch.append(_Watch(predicates, ways))
        stack.callback(_enginecast_watch.pop)
        yield


def asked_of_dtypes(test: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """`x.dtype == torch.float16 and not isfinite(x).all()` as its two halves; None for others.

    A program is captured in one dtype, in which the second half is asked always or never.
    """
    if not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.And):
        return None
    first, *others = test.values
    if not isinstance(first, ast.Compare) or not isinstance(first.left, ast.Attribute):
        return None
    if first.left.attr != "dtype" or any(isinstance(part, ast.Call) for part in ast.walk(first)):
        return None
    rest = others[0] if len(others) == 1 else ast.BoolOp(ast.And(), others)
    return first, ast.copy_location(rest, others[0])
