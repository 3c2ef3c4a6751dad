"""Convert the statements of one function: every `if`, `while`, `for` and `assert` that may depend
on data.

if p:                       def _ec_then_1(x):
    x = x + 1                   x = x + 1
return x           ->           return (x,)
                            def _ec_else_1(x):
                                return (x,)
                            (x,) = _ec_glue.if_(1, p, _ec_then_1, _ec_else_1, (x,), ("x",))
                            return x
"""

import ast
import copy
from collections.abc import Callable, Sequence
from typing import TypeGuard

from enginecast.capture.control_flow.converters.expressions import (
    FORBIDDEN,
    GLUE,
    Expressions,
    assign,
    bind,
    constants,
    glue,
    is_static,
    later,
    names_tuple,
    place_at,
    undefined,
)
from enginecast.capture.control_flow.converters.jumps import (
    Jumps,
    falls,
    jumps,
    jumps_out_of_blocks,
)
from enginecast.capture.control_flow.converters.liveness import (
    LOOPS,
    SCOPES,
    Liveness,
    appended,
    appended_name,
    blocks,
    bound,
    over_of,
    read,
    walk,
)
from enginecast.capture.python.raising import raises
from enginecast.capture.python.recompile import OWN, arguments

MUTATORS = ("append", "extend", "insert", "update", "add", "pop", "setdefault", "remove", "clear")
SiteIndex = Callable[[ast.AST, str], int]
Note = Callable[[ast.AST, str, str], None]


class Statements:
    """Rewrites the body of one function."""

    def __init__(
        self, function: ast.FunctionDef, place: SiteIndex, note: Note, answered: frozenset[int]
    ) -> None:
        positional = [*function.args.posonlyargs, *function.args.args]
        self._function, self._place, self._note = function, place, note
        self._arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
        self._names = bound(function.body) | self._arguments
        owner = positional[0].arg if positional else ""
        self._expressions = Expressions(place, self._names, owner, answered)
        self._count, self._needs = 0, set[str]()
        self._body = Jumps(is_candidate).function(copy.deepcopy(function.body))
        nested = [node for node in walk(self._body) if isinstance(node, SCOPES)]
        self._live = Liveness(self._body, read(nested))

    def body(self) -> list[ast.stmt]:
        """The new body, which imports the glue."""
        body = self._block(self._body, frozenset())
        start = 0 if ast.get_docstring(self._function) is None else 1
        glued = ast.parse(
            f"import enginecast.capture.control_flow.operators.dispatch as {GLUE}"
        ).body
        first = [*glued, *undefined(self._needs - self._arguments)]
        for node in first:
            place_at(node, self._function.body[0])
        return [*body[:start], *first, *body[start:]]

    def _block(self, body: Sequence[ast.stmt], own: frozenset[str]) -> list[ast.stmt]:
        return [new for node in body for new in self._statement(node, own)]

    def _statement(self, node: ast.stmt, own: frozenset[str]) -> list[ast.stmt]:
        """`own`: names that the branch around it has bound; nobody outside sees them."""
        if isinstance(node, (*SCOPES, ast.Try)):
            # What a `try` catches depends on every operation inside.
            for inner in walk([node]) if isinstance(node, ast.Try) else ():
                if isinstance(inner, ast.If | ast.While):
                    word = type(inner).__name__.lower()
                    self._note(inner, word, "it stands in a try statement")
            return [node]
        if isinstance(node, ast.If) and not is_static(node.test):
            return self._if(node, own)
        if isinstance(node, LOOPS):
            if is_candidate(node):
                return self._loop(node, own)
            if isinstance(node, ast.While):
                self._note(node, "while", unmovable(node) or "")
        if isinstance(node, ast.Assert):
            place = ast.Constant(value=self._place(node, "assert"))
            message = later(ast.Tuple(elts=[*filter(None, [node.msg])], ctx=ast.Load()))
            test = self._expressions.predicate(node.test)
            return [place_at(ast.Expr(glue("assert_", place, test, message)), node)]
        # A path has to return what lives on, and what is gone lives no more.
        if deletes_names(node):
            return [place_at(new, node) for new in undefined(bound([node]))]
        name = appended_name(node)
        if name is not None and name in self._names and isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Call)
            value = self._expressions.visit(node.value.args[0])
            call = glue("append", ast.Name(name, ast.Load()), value)
            return [place_at(assign(name, call), node)]
        # It remains, with what it holds rewritten.
        for block in blocks(node):
            block[:] = self._block(block, own)
        checks = self._writes(node, own)
        for field, held in list(ast.iter_fields(node)):
            if isinstance(held, ast.expr):
                setattr(node, field, self._expressions.visit(held))
        return [*checks, node]

    def _writes(self, node: ast.stmt, own: frozenset[str]) -> list[ast.stmt]:
        """Checks before something is written into a container that others may see."""
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        bases = [t.value for t in targets if isinstance(t, ast.Subscript)]
        call = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
        method = call.func if isinstance(call, ast.Call) else None
        if isinstance(method, ast.Attribute) and method.attr in MUTATORS:
            bases.append(method.value)
        checks: list[ast.stmt] = []
        for base in bases:
            if isinstance(base, ast.Attribute) or (
                isinstance(base, ast.Name) and base.id not in own
            ):
                place = ast.Constant(value=self._place(node, "write"))
                loaded = ast.parse(ast.unparse(base), mode="eval").body
                checks.append(place_at(ast.Expr(glue("into", place, loaded)), node))
        return checks

    def _if(self, node: ast.If, own: frozenset[str]) -> list[ast.stmt]:
        if raises(node.body) or raises(node.orelse):
            return self._check(node, own)
        found = jumps([node])
        returns = any(isinstance(jump, ast.Return) for jump in found)
        reason = unmovable(node)
        if reason is None and any(not isinstance(jump, ast.Return) for jump in found):
            reason = "it jumps out of a loop that cannot be rewritten"
        if reason is None and returns and (falls(node.body) or falls(node.orelse)):
            reason = "it returns from inside a block that cannot be rewritten"
        if reason is not None:
            self._note(node, "if", reason)
            node.body, node.orelse = self._block(node.body, own), self._block(node.orelse, own)
            return [node]
        index = self._place(node, "if")
        self._effects(node, [*node.body, *node.orelse])
        names = sorted(self._bound([*node.body, *node.orelse]))
        live = sorted(set(names) & self._live.after(node))
        self._needs |= set(names)
        paths = []
        for word, block in (("then", node.body), ("else", node.orelse)):
            inner = self._block(block, frozenset(own | bound(block)))
            if not returns:
                inner.append(ast.Return(names_tuple(live)))
            paths.append(self._define(word, names, inner, node))
        test = self._expressions.predicate(node.test)
        calls = [ast.Name(path.name, ast.Load()) for path in paths]
        head: list[ast.expr] = [ast.Constant(index), test, *calls, names_tuple(names)]
        if returns:
            return [*paths, place_at(ast.Return(glue("if_return", *head)), node)]
        call = glue("if_", *head, constants(live))
        return [*paths, place_at(bind(live, call), node)]

    def _check(self, node: ast.If, own: frozenset[str]) -> list[ast.stmt]:
        """An `if` one path of which only raises: it checks that the other one is taken."""
        place = ast.Constant(value=self._place(node, "if"))
        test = self._expressions.predicate(node.test)
        path, other = node.body, node.orelse
        if not raises(path):
            path, other, test = other, path, glue("not_", test)
        names = sorted(bound(path))
        self._needs |= set(names)
        raising = self._define("raise", names, path, node)
        call = glue("raise_if", place, test, ast.Name(raising.name, ast.Load()), names_tuple(names))
        return [raising, place_at(ast.Expr(call), node), *self._block(other, own)]

    def _loop(self, node: ast.For | ast.While, own: frozenset[str]) -> list[ast.stmt]:
        word = "while" if isinstance(node, ast.While) else "for"
        place = ast.Constant(self._place(node, word))
        self._effects(node, node.body)
        over = over_of(node)
        flags = {over} if over else set[str]()
        written = self._bound([node]) | flags
        head = self._head(node) | flags
        names = sorted(name for name in written if name in head or name in self._live.after(node))
        self._needs |= written
        lists = [index for index, name in enumerate(names) if name in appended(node.body)]
        inner = self._block(node.body, frozenset(own | bound(node.body)) - set(names))
        inner.append(ast.Return(names_tuple(names)))
        temporary = undefined(written - set(names))
        last = [names_tuple(names), constants(names)]
        if isinstance(node, ast.For):
            item = f"{OWN}item"
            given = ast.Assign(targets=[node.target], value=ast.Name(item, ast.Load()))
            body = self._define("body", [item, *names], [*temporary, given, *inner], node)
            values = self._expressions.visit(node.iter)
            if is_range(values):
                values = glue("range_", *values.args)
            ends = ast.Constant(value=None if over is None else names.index(over))
            called = ast.Name(body.name, ast.Load())
            call = glue("for_", place, values, called, *last, ends, constants(lists))
            return [body, place_at(bind(names, call), node)]
        body = self._define("body", names, [*temporary, *inner], node)
        decides = self._expressions.predicate(node.test)
        if over is not None:
            ended = glue("not_", ast.Name(over, ast.Load()))
            decides = glue("and_", later(ended), later(decides))
        test = self._define("test", names, [ast.Return(decides)], node)
        functions = [ast.Name(each.name, ast.Load()) for each in (test, body)]
        call = glue("while_", place, *functions, *last, constants(lists))
        return [test, body, place_at(bind(names, call), node)]

    def _head(self, node: ast.For | ast.While) -> frozenset[str]:
        """Names that a round reads before it binds them."""
        marker = ast.Pass()
        test = [ast.Expr(node.test)] if isinstance(node, ast.While) else []
        body = [marker, *test, *node.body]
        live = Liveness(body, read(inner for inner in walk(body) if isinstance(inner, SCOPES)))
        target = bound([node.target]) if isinstance(node, ast.For) else frozenset()
        return live.after(marker) - target

    def _bound(self, nodes: Sequence[ast.AST]) -> frozenset[str]:
        """With the lists that grow."""
        return bound(nodes) | (appended(nodes) & self._names)

    def _effects(self, node: ast.stmt, body: Sequence[ast.AST]) -> None:
        """Note what statements do besides binding names, and cannot be done on one path only."""
        for part in walk(body):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del):
                self._note(node, "effect", f"line {part.lineno} sets {ast.unparse(part)}")
            elif isinstance(part, ast.Try):
                self._note(node, "effect", f"line {part.lineno} catches exceptions")

    def _define(
        self, word: str, names: Sequence[str], body: list[ast.stmt], place: ast.stmt
    ) -> ast.FunctionDef:
        self._count += 1
        name = f"{OWN}{word}_{self._count}"
        function = ast.FunctionDef(name=name, args=arguments(names), body=body, decorator_list=[])
        return place_at(function, place)


UNMOVABLE = (ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.ClassDef)


def is_candidate(loop: ast.For | ast.While) -> bool:
    """Whether a loop may depend on data and can be moved into functions."""
    if over_of(loop) is not None:  # its jumps are taken out
        return True
    if unmovable(loop) is not None:
        return False
    if isinstance(loop, ast.While):
        return True
    values = loop.iter
    if is_range(values):
        is_dynamic = not all(isinstance(bound, ast.Constant) for bound in values.args)
    else:
        is_dynamic = isinstance(values, ast.Name) or is_selection(values)
    ifs = [part for part in walk(loop.body) if isinstance(part, ast.If)]
    return is_dynamic or any(not is_static(one.test) and jumps([one]) for one in ifs)


def unmovable(node: ast.stmt) -> str | None:
    """Why a statement cannot be moved into a function of its own."""
    for part in walk([node]):
        is_written = isinstance(part, ast.Delete) and not deletes_names(part)
        if isinstance(part, UNMOVABLE) or is_written or isinstance(part, FORBIDDEN):
            return f"line {getattr(part, 'lineno', 0)} cannot stand in a function of its own"
    if isinstance(node, LOOPS) and node.orelse:
        return "it has an else"
    if isinstance(node, LOOPS) and jumps_out_of_blocks(node.body):
        return "it is left from inside a with or try"
    return None


def deletes_names(node: ast.stmt) -> bool:
    """Whether a statement unbinds plain names and nothing else."""
    return isinstance(node, ast.Delete) and all(isinstance(t, ast.Name) for t in node.targets)


def is_selection(values: ast.AST) -> bool:
    """Whether these are the places of what is true in a mask."""
    called = values.func if isinstance(values, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in ("nonzero", "argwhere")


def is_range(values: ast.AST) -> TypeGuard[ast.Call]:
    return (
        isinstance(values, ast.Call)
        and isinstance(values.func, ast.Name)
        and values.func.id == "range"
        and not values.keywords
    )
