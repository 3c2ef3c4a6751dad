"""Find the part of a feed-forward that is linear in one of its weights, up to the projection that
reads it.

    gated:  wo(dropout(gelu(wi_0 x) * wi_1 x))    2^-j on wi_1, 2^j on wo
    relu:   wo(dropout(relu(wi x)))               2^-j on wi, 2^j on wo
"""

from dataclasses import dataclass

from torch.fx import Node

from enginecast.passes.graph_edit import aten
from enginecast.passes.match import NoMatch, is_call, op_name, real_users
from enginecast.passes.residual_stream import SUMS, carried, foldable


@dataclass(frozen=True)
class Branch:
    """Values that a factor of the weights of one linear scales."""

    members: tuple[Node, ...]
    """From the linear to what the projection reads."""
    entries: tuple[tuple[Node, Node], ...]
    """(member, weight that is scaled for it)"""


def find_branch(projection: Node, weights: set[Node]) -> Branch:
    """The branch that feeds a projection.

    Args:
        projection: a linear or matrix product whose weight is a weight expression.
        weights: every weight expression of the program.

    Raises:
        NoMatch: at the op that no factor passes through.
    """
    source = projection.args[1 if is_call(projection, aten.addmm.default) else 0]
    assert isinstance(source, Node)
    return _branch(source, projection, weights)


def _branch(node: Node, reader: Node, weights: set[Node]) -> Branch:
    if real_users(node) != [reader]:
        raise NoMatch(node, f"{op_name(node)} is read elsewhere as well")
    own = foldable(node, weights)
    if own:
        return Branch((node,), tuple((node, source) for source in own))
    if is_call(node, aten.mul.Tensor) and not carried(node):
        return _onto(node, _either(node, weights))
    sources = carried(node)
    if len(sources) != 1 or is_call(node, *SUMS):
        raise NoMatch(node, f"no power of two passes through {op_name(node)}")
    return _onto(node, _branch(sources[0], node, weights))


def _either(product: Node, weights: set[Node]) -> Branch:
    """The shorter of the factors that are branches: the other one holds the activation."""
    found: list[Branch] = []
    misses: list[NoMatch] = []
    for source in dict.fromkeys(product.args[:2]):
        try:
            if isinstance(source, Node):
                found.append(_branch(source, product, weights))
        except NoMatch as miss:
            misses.append(miss)
    if not found:
        raise misses[0] if misses else NoMatch(product, "a value times a number that varies")
    return min(found, key=lambda branch: len(branch.members))


def _onto(node: Node, branch: Branch) -> Branch:
    return Branch((*branch.members, node), branch.entries)
