"""Find inputs for both paths of every branch: a path that never ran is not verified.

The tests of `if`, `while` and conditional expressions, the iterables of `for`, and the ends of
`try` are wrapped in the source; the wrapped code runs within a `with` block, and records the paths
taken.
"""

import ast
import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.recorder import Recorder
from enginecast.capture.control_flow.detect.statements import entered
from enginecast.capture.inputs.examples import Case, perturbed
from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.python.locations import (
    SourceLocation,
    Spot,
    holds,
    is_library_code,
    real_path,
)
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.python.raising import checks
from enginecast.capture.python.recompile import SourceUnavailable, first_line, source_of, swapped
from enginecast.errors import CaptureError

MOST_TRIALS = 160
"""Most runs of the model in search of paths that the verification inputs do not take."""
Form = Literal["branch", "loop", "try"]
WATCH = "_enginecast_watch"


@dataclass(frozen=True)
class Predicate:
    """One test or loop in the source."""

    place: SourceLocation
    column: int
    form: Form
    code: str
    """Source of the test, of the loop's iterable, or of the first line in the `try`."""


@dataclass
class SeenPaths:
    """The paths that were seen: True and False of a branch, numbers of rounds of a loop, 0 of what
    was tried, and 1 where it raised.
    """

    seen: dict[Predicate, set[int]] = field(default_factory=dict)
    passed: set[Predicate] = field(default_factory=set)
    """Tests decided by a dtype, so that their condition on values was not evaluated."""

    def open(self) -> list[Predicate]:
        """Predicates with only one path seen, without those never reached."""
        return [predicate for predicate, paths in self.seen.items() if len(paths) < 2]

    def add(self, other: "SeenPaths") -> bool:
        """Add the paths of another run; return whether any was new."""
        is_new = False
        self.passed |= other.passed
        for predicate, paths in other.seen.items():
            known = self.seen.setdefault(predicate, set())
            # A third number of rounds proves nothing more.
            if len(known) < 2 and paths - known:
                known |= paths
                is_new = True
        return is_new

    def describe(self, predicate: Predicate) -> str:
        """The path seen of an open predicate, in words."""
        [path] = self.seen[predicate]
        if predicate.form == "branch":
            return f"was always {bool(path)}"
        if predicate.form == "try":
            return "never raised"
        return f"always went {path} round{'' if path == 1 else 's'}"


@dataclass(frozen=True)
class Coverage:
    """Predicates at some places of a model's code, ready to be watched.

    Args:
        definitions: function -> its definition with wrapped tests.
        predicates: index used by the wrapped tests -> predicate.
        unseen: places without a readable source.
    """

    definitions: Mapping[FunctionType, ast.FunctionDef]
    predicates: tuple[Predicate, ...]
    unseen: tuple[SourceLocation, ...] = ()

    @contextmanager
    def watched(self) -> Iterator[SeenPaths]:
        """Within the block, runs of the model add to the paths that are yielded."""
        paths = SeenPaths()
        _enginecast_watch.append(_Watch(self.predicates, paths))
        try:
            with swapped(self.definitions):
                yield paths
        finally:
            _enginecast_watch.pop()

    def run(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> SeenPaths:
        """What one run takes; the recorder stops loops without end."""
        with self.watched() as paths, torch.no_grad(), Recorder(module, inputs):
            module(**inputs)
        return paths

    def is_open(self, paths: SeenPaths) -> bool:
        """Whether there are other paths in code that can be read."""
        met = paths.seen.keys() | paths.passed
        return bool(paths.open()) or any(each not in met for each in self.predicates)

    def left(self, paths: SeenPaths) -> "list[Unverified]":
        """The predicates of which a path was not seen."""
        met = paths.seen.keys() | paths.passed
        said = [
            *((place, "its source cannot be read") for place in self.unseen),
            *((p.place, f"`{p.code}` {paths.describe(p)}") for p in paths.open()),
            *((p.place, f"`{p.code}` was never reached") for p in self.predicates if p not in met),
        ]
        return [Unverified(str(place), why, is_library_code(place.file)) for place, why in said]


def find_predicates(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    places: Collection[SourceLocation],
    settled: Collection[Spot] = (),
) -> Coverage:
    """The predicates at `places`, in functions that a run of `module` on `inputs` enters.

    A test over several lines counts for each of them; tests in `settled` are skipped.
    """
    definitions: dict[FunctionType, ast.FunctionDef] = {}
    predicates: list[Predicate] = []
    found: set[SourceLocation] = set()
    functions: dict[int, FunctionType] = {}
    for code in entered(module, inputs):
        file = real_path(code.co_filename)
        if any(known == file and holds(code, line) for known, line in places):
            made = (each for each in gc.get_referrers(code) if isinstance(each, FunctionType))
            functions |= {id(each): each for each in made if each.__code__ is code}
    for function in functions.values():
        try:
            source = source_of(function)
        except SourceUnavailable:
            continue
        file = real_path(source.file)
        lines = {line for known, line in places if known == file}
        spots = {(line, column) for (known, line), column in settled if known == file}
        definition = source.definition
        wrap = _Wrap(file, lines, predicates, spots, checks(definition))
        # A line that reads a value and tests none has one path.
        span = range(first_line(definition), (definition.end_lineno or 0) + 1)
        found |= {SourceLocation(wrap.file, line) for line in lines if line in span}
        definitions[source.function] = wrap.visit(definition)
    return Coverage(definitions, tuple(predicates), tuple(sorted(set(places) - found)))


class _Wrap(ast.NodeTransformer):
    """Wraps the tests and iterables on some lines of one function."""

    def __init__(
        self,
        file: str,
        lines: Collection[int],
        predicates: list[Predicate],
        settled: Collection[tuple[int, int]],
        checks: frozenset[ast.If],
    ) -> None:
        self.file = file
        self._lines = lines
        self._predicates = predicates
        self._settled = settled
        self._checks = checks
        self._is_in_test = False

    def visit_If(self, node: ast.If) -> ast.AST:
        if node in self._checks:  # one path is an error: nothing to compare
            self._visit_with_test(node)
            return node
        return self._with_test(node, "branch")

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._with_test(node, "branch")

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Wrap an `and` or `or` that is used as a value and not as a test."""
        is_settled = (node.lineno, node.col_offset) in self._settled
        is_wanted = not is_settled and self._is_wanted(node)
        self.generic_visit(node)
        if is_wanted and not self._is_in_test:
            first = [self._call("truth", part, "branch") for part in node.values[:-1]]
            node.values = [*first, node.values[-1]]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node  # the other path is an error

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._with_test(node, "loop")

    def visit_Try(self, node: ast.Try) -> ast.AST:
        is_wanted = any(map(self._is_wanted, node.body))
        code = ast.unparse(node.body[0])
        self.generic_visit(node)
        if is_wanted and node.handlers:
            taken = self._add(node, "try", code)
            node.body.insert(0, self._noted(node, taken, 0))
            for handler in node.handlers:
                handler.body.insert(0, self._noted(handler, taken, 1))
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        is_settled = (node.lineno, node.col_offset) in self._settled
        is_wanted = not is_settled and self._is_wanted(node.iter)
        self.generic_visit(node)
        if is_wanted:
            node.iter = self._call("rounds", node.iter, "loop")
        return node

    def _with_test(self, node: ast.If | ast.IfExp | ast.While, form: Form) -> ast.AST:
        is_settled = (node.lineno, node.col_offset) in self._settled
        is_wanted = not is_settled and self._is_wanted(node.test)
        self._visit_with_test(node)
        asked = asked_of_dtypes(node.test)
        if is_wanted and asked is not None and form == "branch":
            dtypes, rest = asked
            number = self._add(node.test, form, ast.unparse(node.test))
            values = _watch(f"branch({number})", node.test)
            values.args.append(rest)
            passed = _watch(f"passed({number})", node.test)
            node.test = ast.copy_location(ast.IfExp(dtypes, values, passed), node.test)
        # `while True` has one path: its breaks decide.
        elif is_wanted and not isinstance(node.test, ast.Constant):
            node.test = self._call("branch" if form == "branch" else "again", node.test, form)
        return node

    def _visit_with_test(self, node: ast.If | ast.IfExp | ast.While) -> None:
        before, self._is_in_test = self._is_in_test, True
        node.test = self.visit(node.test)
        self._is_in_test = before
        test, node.test = node.test, ast.Constant(value=True)
        self.generic_visit(node)
        node.test = test

    def _is_wanted(self, test: ast.expr | ast.stmt) -> bool:
        """Whether a test or statement is on one of the lines."""
        last = test.end_lineno or test.lineno
        return any(test.lineno <= line <= last for line in self._lines)

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

    def _noted(self, node: ast.stmt | ast.excepthandler, number: int, path: int) -> ast.stmt:
        return ast.copy_location(ast.Expr(_watch(f"note({number}, {path})", node)), node)


def _watch(call: str, place: ast.AST) -> ast.Call:
    """A call of the innermost `_Watch`, at the line of `place`."""
    watch = f"__import__('enginecast.capture.control_flow.cover.branches', fromlist=['']).{WATCH}"
    made = ast.parse(f"{watch}[-1].{call}", mode="eval").body
    assert isinstance(made, ast.Call)
    for part in ast.walk(made):
        ast.copy_location(part, place)
    return made


class _Watch:
    """The object that wrapped code calls."""

    def __init__(self, predicates: tuple[Predicate, ...], paths: SeenPaths) -> None:
        self._predicates = predicates
        self._paths = paths
        self._rounds: dict[int, int] = {}

    def branch(self, number: int, test: Any) -> bool:
        value = bool(test)
        self.note(number, int(value))
        return value

    def truth(self, number: int, value: Any) -> Any:
        self.note(number, int(bool(value)))
        return value

    def passed(self, number: int) -> bool:
        self._paths.passed.add(self._predicates[number])
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

    def note(self, number: int, path: int) -> None:
        self._paths.seen.setdefault(self._predicates[number], set()).add(path)


_enginecast_watch: list[_Watch] = []


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


class Unverified(NamedTuple):
    """A branch with a path that no input took."""

    place: str
    """FILE:LINE."""
    seen: str
    """The code, and the value it always had."""
    is_of_library: bool = False
    """Whether torch, transformers or Python has it."""

    def __str__(self) -> str:
        return f"unverified branch: {self.place}: {self.seen}"


@dataclass(frozen=True)
class Branches:
    """Predicates that decide about a capture, and inputs that take their paths."""

    cases: tuple[Case, ...]
    """What the verification inputs lack to take every path that was found."""
    verified: tuple[str, ...]
    """Predicates of which both paths were seen, as FILE:LINE."""
    unverified: tuple[Unverified, ...]
    """Those of which one path was found, or none."""
    in_libraries: tuple[Unverified, ...]
    """The same within torch, transformers or Python, whose branches reject no model."""


def cover(
    module: nn.Module,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    places: Collection[SourceLocation],
    seed: int,
    settled: Collection[Spot] = (),
) -> Branches:
    """Run `module` until both paths of each predicate were seen, or the search is over.

    Raises:
        CaptureError: a loop that does not end on one of `cases`.
    """
    found = find_predicates(module, cases[0].inputs, places, settled)
    paths = SeenPaths()
    added: list[Case] = []
    has_run = False
    with quiet_torch():
        for case in cases:
            try:
                paths.add(found.run(module, case.inputs))
            except CaptureError:
                raise
            except Exception:  # the model's own; the comparison with eager will report it
                continue
            has_run = True
        # Where none has run, eager runs on nothing, which is reported.
        trials = perturbed(specs, [case.inputs for case in cases], seed) if has_run else iter(())
        for inputs in islice(trials, MOST_TRIALS):
            if not found.is_open(paths):
                break
            try:
                seen = found.run(module, inputs)
            except Exception:  # the model's own, at values that nobody promised it takes
                continue
            fresh = [p for p, taken in seen.seen.items() if taken - paths.seen.get(p, set())]
            new = dict.fromkeys(p.place.short for p in fresh if len(paths.seen.get(p, ())) < 2)
            if paths.add(seen):
                added.append(Case(f"other path at {', '.join(new)}", inputs))
    left = found.left(paths)
    return Branches(
        tuple(added),
        verified=tuple(str(p.place) for p, seen in paths.seen.items() if len(seen) > 1),
        unverified=tuple(each for each in left if not each.is_of_library),
        in_libraries=tuple(each for each in left if each.is_of_library),
    )


def by_paths(
    module: nn.Module,
    cases: Sequence[Case],
    places: Collection[SourceLocation],
    most: int,
) -> tuple[list[Case], list[Unverified]]:
    """One case for each way in which the predicates at `places` decide together, the first of those
    that take it, and the predicates of which no case takes one of the paths.

    Args:
        most: cases, at most; those that take a path for the first time come before others.
    """
    found = find_predicates(module, cases[0].inputs, places)
    paths = SeenPaths()
    needed: list[Case] = []
    others: list[Case] = []
    known: set[frozenset[tuple[Predicate, frozenset[int]]]] = set()
    with quiet_torch():
        for case in cases:
            try:
                seen = found.run(module, case.inputs)
            except Exception:  # the model's own; the comparison with eager reports it
                continue
            decided = frozenset((p, frozenset(taken)) for p, taken in seen.seen.items())
            if decided not in known:
                (needed if paths.add(seen) else others).append(case)
            known.add(decided)
    return [*needed, *others][:most], found.left(paths)
