"""How many rows a value has, by which passes choose between forms that differ in speed alone."""

import math
from typing import Any

from torch.fx import Node

from enginecast.passes.ir.edit import shape_of


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
