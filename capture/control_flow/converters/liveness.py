"""Which names statements bind and read, and which are live after each statement."""

import ast
from collections.abc import Iterable, Iterator, Sequence

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOOPS = (ast.For, ast.While)
Names = frozenset[str]


def walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes below and the given ones, but not what is inside nested functions."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, SCOPES):
            waiting += ast.iter_child_nodes(node)


def blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The lists of statements within a statement, but not those of functions and classes."""
    if not isinstance(node, SCOPES):
        for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            for field in ("body", "orelse", "finalbody"):
                yield from filter(None, [getattr(part, field, None)])


def bound(nodes: Iterable[ast.AST]) -> Names:
    """Names that statements may bind in the function they stand in."""
    found: set[str] = set()
    hidden: set[int] = set()  # a comprehension's own names
    for node in walk(nodes):
        if isinstance(node, COMPREHENSIONS):
            hidden |= {id(n) for part in node.generators for n in ast.walk(part.target)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found |= {node.id} if id(node) not in hidden else set()
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return frozenset(found)


def appended(nodes: Iterable[ast.AST]) -> Names:
    """Names of what statements append to: `rows.append(row)`."""
    names = (appended_name(node) for node in walk(nodes))
    return frozenset(name for name in names if name is not None)


def appended_name(node: ast.AST) -> str | None:
    """`rows` of the statement `rows.append(row)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return None
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr != "append":
        return None
    return function.value.id if isinstance(function.value, ast.Name) else None


def read(nodes: Iterable[ast.AST]) -> Names:
    """Names that are read, in nested functions too."""
    return frozenset(
        name.id
        for node in nodes
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
    )


def over_of(loop: ast.stmt) -> str | None:
    """The flag that ends a loop."""
    name = getattr(loop, "ec_over", None)
    return name if isinstance(name, str) else None


class Liveness:
    """The names whose values may be read after each statement of a function."""

    def __init__(self, body: Sequence[ast.stmt], captured: Names = frozenset()) -> None:
        """`captured`: names that nested functions read, at any time."""
        self._after: dict[int, Names] = {}
        self._captured = captured
        self._kept = body  # ids stay those of these nodes
        self._block(body, frozenset(), (frozenset(), frozenset()))

    def after(self, statement: ast.stmt) -> Names:
        return self._after[id(statement)] | self._captured

    def _block(self, body: Sequence[ast.stmt], live: Names, loop: tuple[Names, Names]) -> Names:
        """Names live before `body`; `loop` has those at `continue` and at `break`."""
        for statement in reversed(body):
            self._after[id(statement)] = self._after.get(id(statement), frozenset()) | live
            live = self._before(statement, live, loop)
        return live

    def _before(self, node: ast.stmt, live: Names, loop: tuple[Names, Names]) -> Names:
        if isinstance(node, ast.If):
            paths = (self._block(node.body, live, loop), self._block(node.orelse, live, loop))
            return read([node.test]) | paths[0] | paths[1]
        if isinstance(node, LOOPS):
            return self._loop(node, live, loop)
        if isinstance(node, ast.With):
            inner = self._block(node.body, live, loop)
            return read(item.context_expr for item in node.items) | inner
        if isinstance(node, ast.Return | ast.Raise):
            return read([node])
        if isinstance(node, ast.Break | ast.Continue):
            return loop[isinstance(node, ast.Break)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return (live - bound(targets)) | read([node]) | appended([node])
        if isinstance(node, ast.AugAssign):
            return live | read([node]) | bound([node])
        if isinstance(node, ast.Expr):
            return live | read([node])
        # Of `try` and the like: whatever they read may be read after any part of them.
        for block in blocks(node):
            self._block(block, live | read([node]), loop)
        return live | read([node]) | bound([node])

    def _loop(self, node: ast.For | ast.While, live: Names, loop: tuple[Names, Names]) -> Names:
        after = self._block(node.orelse, live, loop) | live
        test = read([node.test]) if isinstance(node, ast.While) else frozenset()
        over = over_of(node)
        head = after | test | ({over} if over else set())
        for _ in range(3):  # what is live at the end of the body is live at its head
            head = head | self._block(node.body, head, (head, live))
        if isinstance(node, ast.For):
            return (head - bound([node.target])) | read([node.iter]) | after
        return head
