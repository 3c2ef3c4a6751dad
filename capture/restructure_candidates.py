"""Which statements may depend on data, and which can be moved into functions of their own."""

import ast
from collections.abc import Iterator, Sequence

from enginecast.capture.restructure_expressions import is_forbidden, is_static
from enginecast.capture.restructure_jumps import jumps_out_of_blocks
from enginecast.capture.restructure_names import LOOPS, SCOPES, over_of, walk

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
