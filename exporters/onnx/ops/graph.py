"""What changes of a graph are made of."""

import math
from typing import Any

from torch.fx import Node

from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.edit import aten, insert, shape_of


def size_of(program: ProgramView, source: Node, dim: int, like: Node) -> Node | int:
    """A size as an argument: a number, or a node that gives it."""
    size = shape_of(source)[dim]
    if isinstance(size, int):
        return size
    return insert(program.graph, aten.sym_size.int, (source, dim), like=like)


def captured_rows(source: Node) -> int | None:
    """The rows of a value, with sizes that vary as they were captured.

    None where values decide their number: nobody captured it.
    """
    sizes = [_captured(size) for size in shape_of(source)[:-1]]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def _captured(size: Any) -> int | None:
    if isinstance(size, int):
        return size
    hint: int | None = size.node.hint
    return hint
