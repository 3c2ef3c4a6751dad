"""Values that a pass has scaled by a power of two: how much, for whoever compares them with others.

The exponent stands in the node's metadata.  `graph_edit.take_place` hands it on, so that a node
which a later pass puts in place of another says the same of its value.
"""

from torch.fx import Node

from enginecast.passes.graph_edit import SCALE


def scale_of(node: Node) -> int:
    """The exponent e of a value that is 2^e times what the captured program computes there."""
    found = node.meta.get(SCALE, 0)
    assert isinstance(found, int)
    return found


def mark_scaled(node: Node, exponent: int) -> None:
    """Record that the value of `node` is 2^exponent times what it was."""
    total = scale_of(node) + exponent
    if total:
        node.meta[SCALE] = total
    else:
        node.meta.pop(SCALE, None)
