"""Which values computed from integers hold numbers that a low dtype does not, such as masks."""

import math
from collections.abc import Mapping

from torch.fx import Node

from enginecast.passes.dtype_kinds import Class
from enginecast.passes.dtype_ops import BOUNDED


def from_large_literal(node: Node, limit: float, classes: Mapping[Node, Class]) -> bool:
    """Whether a finite literal beyond the limit goes into a value computed from integers."""
    found, todo = {node}, [node]
    while todo:
        here = todo.pop()
        if here.target in BOUNDED:
            continue
        if any(isinstance(a, float) and limit < abs(a) < math.inf for a in here.args):
            return True
        sources = {s for s in here.all_input_nodes if classes.get(s) is Class.EXACT} - found
        found |= sources
        todo += [s for s in sources if s.op == "call_function"]
    return False
