"""Statements of one function: every `if`, `while`, `for` and `assert` that may depend on data.

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
from collections.abc import Callable, Iterator, Sequence

from enginecast.capture.control_flow.converters.build import (
    GLUE,
    bind,
    constants,
    glue,
    later,
    loaded,
    names_tuple,
    place_at,
    strings,
    undefined,
)
from enginecast.capture.control_flow.converters.expressions import (
    Expressions,
    is_forbidden,
    is_static,
)
from enginecast.capture.control_flow.converters.jumps import (
    PREFIX,
    Jumps,
    falls,
    jumps_out_of_blocks,
)
from enginecast.capture.control_flow.converters.liveness import (
    LOOPS,
    SCOPES,
    Liveness,
    appended,
    appended_name,
    bound,
    over_of,
    read,
    walk,
)

MUTATORS = ("append", "extend", "insert", "update", "add", "pop", "setdefault", "remove", "clear")
Place = Callable[[ast.AST, str], int]
Note = Callable[[ast.AST, str, str], None]


class Statements:
    """Rewrites the body of one function."""

    def __init__(
        self, function: ast.FunctionDef, place: Place, note: Note, answered: frozenset[int]
    ) -> None:
        arguments = [*function.args.posonlyargs, *function.args.args]
        self._function, self._place, self._note = function, place, note
        self._arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
        self._names = bound(function.body) | self._arguments
        owner = arguments[0].arg if arguments else ""
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
        first = [*glued, *undefined(sorted(self._needs - self._arguments))]
        for node in first:
            place_at(node, self._function.body[0])
        return [*body[:start], *first, *body[start:]]

    def _block(self, body: Sequence[ast.stmt], own: frozenset[str]) -> list[ast.stmt]:
        return [new for node in body for new in self._statement(node, own)]

    def _statement(self, node: ast.stmt, own: frozenset[str]) -> list[ast.stmt]:
        """`own`: names that the branch around it has bound; nobody outside sees them."""
        if isinstance(node, (*SCOPES, ast.Try)):
            for decides in caught(node):
                self._note(*decides, "it stands in a try statement")
            return [node]  # what is caught depends on every operation inside
        if isinstance(node, ast.If) and not is_static(node.test):
            return self._if(node, own)
        if isinstance(node, LOOPS):
            if is_candidate(node):
                return self._loop(node, own)
            if isinstance(node, ast.While):
                self._note(node, "while", unmovable(node) or "")
        if isinstance(node, ast.Assert):
            return [self._assert(node)]
        if deletes_names(node):  # a way has to return what lives on, and what is gone lives no more
            return [place_at(new, node) for new in undefined(sorted(bound([node])))]
        name = appended_name(node)
        if name is not None and name in self._names and isinstance(node, ast.Expr):
            return [self._append(node, name)]
        return self._other(node, own)

    def _other(self, node: ast.stmt, own: frozenset[str]) -> list[ast.stmt]:
        """A statement that remains, with what it holds rewritten."""
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, self._block(block, own))
        for part in getattr(node, "cases", ()):
            part.body = self._block(part.body, own)
        return [*self._writes(node, own), self._plain(node)]

    def _plain(self, node: ast.stmt) -> ast.stmt:
        """With its own expressions rewritten; its blocks are done."""
        for field, value in list(ast.iter_fields(node)):
            if isinstance(value, ast.expr):
                rewritten = self._expressions.visit(value)
                setattr(node, field, rewritten)
        return node

    def _append(self, node: ast.Expr, name: str) -> ast.stmt:
        assert isinstance(node.value, ast.Call)
        value = self._expressions.visit(node.value.args[0])
        assert isinstance(value, ast.expr)
        call = glue("append", ast.Name(name, ast.Load()), value)
        return place_at(ast.Assign(targets=[ast.Name(name, ast.Store())], value=call), node)

    def _writes(self, node: ast.stmt, own: frozenset[str]) -> list[ast.stmt]:
        """Checks before something is written into a container that others may see."""
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        bases = [t.value for t in targets if isinstance(t, ast.Subscript)]
        call = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
        method = call.func if isinstance(call, ast.Call) else None
        if isinstance(method, ast.Attribute) and method.attr in MUTATORS:
            bases.append(method.value)
        bases = [b for b in bases if not (isinstance(b, ast.Name) and b.id in own)]
        place = ast.Constant(value=self._place(node, "write")) if bases else None
        return [
            place_at(ast.Expr(glue("into", place, loaded(base))), node)
            for base in bases
            if place is not None and isinstance(base, ast.Name | ast.Attribute)
        ]

    def _assert(self, node: ast.Assert) -> ast.stmt:
        place = ast.Constant(value=self._place(node, "assert"))
        message = later(ast.Tuple(elts=[*filter(None, [node.msg])], ctx=ast.Load()))
        test = self._expressions.predicate(node.test)
        return place_at(ast.Expr(glue("assert_", place, test, message)), node)

    def _if(self, node: ast.If, own: frozenset[str]) -> list[ast.stmt]:
        for way, other in ((node.body, node.orelse), (node.orelse, node.body)):
            if len(way) == 1 and isinstance(way[0], ast.Raise) and way[0].exc is not None:
                return self._raise(node, way[0], other, is_then=way is node.body, own=own)
        reason = unmovable(node) or self._leaves(node)
        if reason is not None:
            self._note(node, "if", reason)
            node.body, node.orelse = self._block(node.body, own), self._block(node.orelse, own)
            return [node]
        place = self._place(node, "if")
        self._effects(node, [*node.body, *node.orelse])
        names = sorted(self._bound([*node.body, *node.orelse]))
        returns = has(node, ast.Return)
        live = sorted(set(names) & self._live.after(node))
        self._needs |= set(names)
        ways = []
        for word, block in (("then", node.body), ("else", node.orelse)):
            inner = self._block(block, frozenset(own | bound(block)))
            if not returns:
                inner.append(ast.Return(names_tuple(live)))
            ways.append(self._define(word, names, inner, node))
        test = self._expressions.predicate(node.test)
        calls = [ast.Name(way.name, ast.Load()) for way in ways]
        head: list[ast.expr] = [ast.Constant(place), test, *calls, names_tuple(names)]
        if returns:
            return [*ways, place_at(ast.Return(glue("if_return", *head)), node)]
        call = glue("if_", *head, strings(live))
        return [*ways, place_at(bind(live, call), node)]

    def _leaves(self, node: ast.If) -> str | None:
        """Why its ways cannot be functions: they jump somewhere else."""
        if jumps_out(node, ast.Break, ast.Continue):
            return "it jumps out of a loop that cannot be rewritten"
        if has(node, ast.Return) and (falls(node.body) or falls(node.orelse)):
            return "it returns from inside a block that cannot be rewritten"
        return None

    def _raise(
        self,
        node: ast.If,
        thrown: ast.Raise,
        rest: list[ast.stmt],
        is_then: bool,
        own: frozenset[str],
    ) -> list[ast.stmt]:
        assert thrown.exc is not None
        place = ast.Constant(value=self._place(node, "if"))
        test = self._expressions.predicate(node.test)
        if not is_then:
            test = glue("not_", test)
        call = glue("raise_if", place, test, later(thrown.exc))
        return [place_at(ast.Expr(call), node), *self._block(rest, own)]

    def _loop(self, node: ast.For | ast.While, own: frozenset[str]) -> list[ast.stmt]:
        word = "while" if isinstance(node, ast.While) else "for"
        place = self._place(node, word)
        self._effects(node, node.body)
        over = over_of(node)
        written = self._bound([node]) | ({over} if over else set())
        head = self._head(node) | ({over} if over else set())
        names = sorted(name for name in written if name in head or name in self._live.after(node))
        self._needs |= written
        lists = [index for index, name in enumerate(names) if name in appended(node.body)]
        inner = self._block(node.body, frozenset(own | bound(node.body)) - set(names))
        temporary = undefined(sorted(set(written) - set(names)))
        if isinstance(node, ast.For):
            item = f"{PREFIX}item"
            given = ast.Assign(targets=[node.target], value=ast.Name(item, ast.Load()))
            inner = [*temporary, given, *inner, ast.Return(names_tuple(names))]
            body = self._define("body", [item, *names], inner, node)
            return [body, self._for(node, place, body.name, names, lists, over)]
        inner = [*temporary, *inner, ast.Return(names_tuple(names))]
        body = self._define("body", names, inner, node)
        decides = self._expressions.predicate(node.test)
        if over is not None:
            ended = glue("not_", ast.Name(over, ast.Load()))
            decides = glue("and_", later(ended), later(decides))
        test = self._define("test", names, [ast.Return(decides)], node)
        call = glue(
            "while_",
            ast.Constant(place),
            ast.Name(test.name, ast.Load()),
            ast.Name(body.name, ast.Load()),
            names_tuple(names),
            strings(names),
            constants(lists),
        )
        return [test, body, place_at(bind(names, call), node)]

    def _for(
        self,
        node: ast.For,
        place: int,
        body: str,
        names: list[str],
        lists: list[int],
        over: str | None,
    ) -> ast.stmt:
        values = self._expressions.visit(node.iter)
        if is_range(values):
            assert isinstance(values, ast.Call)
            values = glue("range_", *values.args)
        assert isinstance(values, ast.expr)
        call = glue(
            "for_",
            ast.Constant(place),
            values,
            ast.Name(body, ast.Load()),
            names_tuple(names),
            strings(names),
            ast.Constant(value=None if over is None else names.index(over)),
            constants(lists),
        )
        return place_at(bind(names, call), node)

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
        for effect in effects(body):
            self._note(node, "effect", effect)

    def _define(
        self, word: str, names: Sequence[str], body: list[ast.stmt], place: ast.stmt
    ) -> ast.FunctionDef:
        self._count += 1
        given = [ast.arg(arg=name) for name in names]
        arguments = ast.arguments(
            posonlyargs=[], args=given, kwonlyargs=[], kw_defaults=[], defaults=[]
        )
        function = ast.FunctionDef(
            name=f"{PREFIX}{word}_{self._count}", args=arguments, body=body, decorator_list=[]
        )
        place_at(function, place)
        return function


UNMOVABLE = (ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.ClassDef)


def is_candidate(node: ast.stmt) -> bool:
    """Whether a statement may depend on data and can be moved into functions."""
    if over_of(node) is not None:  # its jumps are taken out
        return True
    if isinstance(node, ast.If):
        return not is_static(node.test) and unmovable(node) is None
    if isinstance(node, ast.While):
        return not node.orelse and unmovable(node) is None and not jumps_out_of_blocks(node.body)
    if isinstance(node, ast.For):
        if node.orelse or unmovable(node) is not None or jumps_out_of_blocks(node.body):
            return False
        return _may_be_dynamic(node.iter) or _ends_by_data(node)
    return False


def unmovable(node: ast.stmt) -> str | None:
    """Why a statement cannot be moved into a function of its own."""
    for part in walk([node]):
        is_written = isinstance(part, ast.Delete) and not deletes_names(part)
        if isinstance(part, UNMOVABLE) or is_written or is_forbidden(part):
            return f"line {getattr(part, 'lineno', 0)} cannot stand in a function of its own"
    if isinstance(node, LOOPS) and node.orelse:
        return "it has an else"
    if isinstance(node, LOOPS) and jumps_out_of_blocks(node.body):
        return "it is left from inside a with or try"
    return None


def deletes_names(node: ast.stmt) -> bool:
    """Whether a statement unbinds plain names and nothing else."""
    return isinstance(node, ast.Delete) and all(isinstance(t, ast.Name) for t in node.targets)


def effects(nodes: Sequence[ast.AST]) -> list[str]:
    """What statements do besides binding names, and cannot be done on one way only."""
    found = []
    for node in walk(nodes):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found.append(f"line {node.lineno} sets {ast.unparse(node)}")
        elif isinstance(node, ast.Try):
            found.append(f"line {node.lineno} catches exceptions")
    return list(dict.fromkeys(found))


def _may_be_dynamic(values: ast.expr) -> bool:
    if is_range(values):
        assert isinstance(values, ast.Call)
        return not all(isinstance(bound, ast.Constant) for bound in values.args)
    return isinstance(values, ast.Name)


def is_range(values: ast.AST) -> bool:
    return (
        isinstance(values, ast.Call)
        and isinstance(values.func, ast.Name)
        and values.func.id == "range"
        and not values.keywords
    )


def _ends_by_data(node: ast.For) -> bool:
    """Whether the loop is left by an `if` that may depend on data."""
    jumps = (ast.Break, ast.Continue, ast.Return)
    ifs = [part for part in walk(node.body) if isinstance(part, ast.If)]
    return any(not is_static(one.test) and has(one, *jumps) for one in ifs)


def has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(part, kinds) for part in walk([node]))


def jumps_out(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    """Whether there is a jump that belongs to a loop around `node`."""
    return any(
        isinstance(part, kinds)
        or (not isinstance(part, (*LOOPS, *SCOPES)) and jumps_out(part, *kinds))
        for part in ast.iter_child_nodes(node)
    )


def caught(node: ast.stmt) -> Iterator[tuple[ast.AST, str]]:
    """What decides within a try statement, with its kind; nothing of any other statement."""
    for inner in walk([node]) if isinstance(node, ast.Try) else ():
        if isinstance(inner, (ast.If, ast.While)):
            yield inner, type(inner).__name__.lower()
