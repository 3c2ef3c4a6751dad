"""How many rows a value has, by which passes choose between forms that differ in speed alone."""

import math
from typing import Any

from torch.fx import Node

from enginecast.passes.ir.edit import shape_of


def captured_rows(source: Node) -> int:
    """The rows of a value, with sizes that vary as they were captured."""
    return math.prod(map(_captured, shape_of(source)[:-1]))


def _captured(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
