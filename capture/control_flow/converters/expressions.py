"""Convert expressions that depend on the truth of a value: `and`, `or`, `not`, ternaries, `int()`.

Beginning with the pieces that new code is made of.
"""

import ast
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from enginecast.capture.control_flow.converters.liveness import COMPREHENSIONS, SCOPES, walk
from enginecast.capture.python.recompile import OWN, arguments

GLUE = f"{OWN}glue"
Placed = TypeVar("Placed", bound=ast.AST)
CASTS = ("int", "float", "bool", "len")
STATIC_CALLS = ("isinstance", "hasattr", "callable", "issubclass")
FORBIDDEN = (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await)


def names_tuple(names: Sequence[str]) -> ast.Tuple:
    return ast.Tuple(elts=[ast.Name(name, ast.Load()) for name in names], ctx=ast.Load())


def constants(values: Sequence[int | str]) -> ast.Tuple:
    return ast.Tuple(elts=[ast.Constant(value=value) for value in values], ctx=ast.Load())


def bind(names: Sequence[str], call: ast.expr) -> ast.stmt:
    if not names:
        return ast.Expr(value=call)
    target = ast.Tuple(elts=[ast.Name(name, ast.Store()) for name in names], ctx=ast.Store())
    return ast.Assign(targets=[target], value=call)


def assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign(targets=[ast.Name(name, ast.Store())], value=copy.deepcopy(value))


def undefined(names: Iterable[str]) -> list[ast.stmt]:
    value = ast.Attribute(ast.Name(GLUE, ast.Load()), "UNDEFINED", ast.Load())
    return [assign(name, value) for name in sorted(names)]


def glue(name: str, *arguments: ast.expr) -> ast.Call:
    """A call of the glue."""
    function = ast.Attribute(ast.Name(GLUE, ast.Load()), name, ast.Load())
    return ast.Call(func=function, args=list(arguments), keywords=[])


def later(value: ast.expr) -> ast.Lambda:
    """A function without arguments that gives `value`."""
    return ast.Lambda(args=arguments([]), body=value)


def place_at(node: Placed, place: ast.AST) -> Placed:
    """Give `node`, and what is new below it, the first line of `place`.

    Python takes the last line of what is called for the line of a call.
    """
    ast.copy_location(node, place)
    made: Any = node
    made.end_lineno, made.end_col_offset = made.lineno, made.col_offset
    ast.fix_missing_locations(node)
    return node


def is_static(test: ast.expr) -> bool:
    """Whether a predicate cannot depend on the values or sizes of tensors, whatever they are."""
    if isinstance(test, ast.Constant):
        return True
    if isinstance(test, ast.BoolOp):
        return all(is_static(value) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return is_static(test.operand)
    if isinstance(test, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot) for op in test.ops)
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id in STATIC_CALLS
    return isinstance(test, ast.Attribute) and test.attr == "training"


def is_forbidden(node: ast.AST) -> bool:
    """Whether it binds a name or gives up control inside of an expression."""
    return any(isinstance(part, FORBIDDEN) for part in walk([node]))


class _Casts(ast.NodeTransformer):
    """Rewrites `int(x)` and its like, which read a number out of a tensor."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        """Names that are bound in the function."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        is_cast = name in CASTS and name not in self._names
        if is_cast and len(node.args) == 1 and not node.keywords:
            return place_at(glue(f"{name}_", *node.args), node)
        return node


class Expressions(_Casts):
    """Rewrites expressions; what is inside lambdas and comprehensions remains as it is, but for
    casts in comprehensions.
    """

    def __init__(
        self,
        place: Callable[[ast.AST, str], int],
        names: frozenset[str],
        owner: str,
        answered: frozenset[int] = frozenset(),
    ):
        """`place` gives the index of a place; `names` are bound in the function.

        `owner` is the first argument, which `super()` means; what `answered` lines read is known.
        """
        super().__init__(names)
        self._place = place
        self._owner = owner
        self._answered = answered

    def predicate(self, test: ast.expr) -> ast.expr:
        """The same, where only the truth of the value matters."""
        if is_static(test):
            return test
        if self._is_answered(test):
            # Read here, or the glue would get the tensor.
            return ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), test))
        rewritten: ast.expr = Items().visit(self._truth(test))
        return rewritten

    def _truth(self, node: ast.expr) -> ast.expr:
        """Rewritten where only the truth of the value matters, and not which value it is."""
        is_left = is_static(node) or is_forbidden(node) or self._is_answered(node)
        if not isinstance(node, ast.BoolOp) or is_left:
            rewritten: ast.expr = self.visit(node)
            return rewritten
        parts = map(later, map(self._truth, node.values))
        return place_at(glue("and_" if isinstance(node.op, ast.And) else "or_", *parts), node)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, COMPREHENSIONS) and not self._is_answered(node):
            return _Casts(self._names).visit(node)
        if isinstance(node, SCOPES) or self._is_answered(node):
            return node
        rewritten: ast.AST = super().visit(node)
        if rewritten is not node:
            place_at(rewritten, node)
        return rewritten

    def _is_answered(self, node: ast.AST) -> bool:
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        return isinstance(node, ast.expr) and any(first <= n <= last for n in self._answered)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        if is_static(node.test) or is_forbidden(node):
            self.generic_visit(node)
            return node
        place = ast.Constant(value=self._place(node, "ternary"))
        paths = (self.visit(node.body), self.visit(node.orelse))
        return glue("ternary", place, self.predicate(node.test), *map(later, paths))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """It gives one of the values, which need not be a boolean."""
        self.generic_visit(node)
        if is_static(node) or is_forbidden(node):
            return node
        was = "and" if isinstance(node.op, ast.And) else "or"
        place = ast.Constant(value=self._place(node, was))
        return glue(f"{was}_value", place, *map(later, node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not) and not is_static(node.operand):
            return glue("not_", self._truth(node.operand))
        self.generic_visit(node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """`a < b < c` is `a < b and b < c` where b is a name or a constant."""
        self.generic_visit(node)
        middle = node.comparators[:-1]
        if not middle or not all(isinstance(part, ast.Name | ast.Constant) for part in middle):
            return node
        left: list[ast.expr] = [node.left, *middle]
        pairs = zip(left, node.ops, node.comparators, strict=True)
        parts = [ast.Compare(left=one, ops=[op], comparators=[other]) for one, op, other in pairs]
        return glue("and_", *map(later, parts))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        cast = super().visit_Call(node)
        if cast is not node or not isinstance(node.func, ast.Name) or node.func.id in self._names:
            return cast
        if node.func.id == "super" and not node.args:
            node.args = [ast.Name("__class__", ast.Load()), ast.Name(self._owner, ast.Load())]
        return node


class Items(ast.NodeTransformer):
    """`x.item()` in a predicate may stay a tensor."""

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        if not node.args.args:
            node.body = self.visit(node.body)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "item" and not node.args:
            return place_at(glue("item", function.value), node)
        return node
