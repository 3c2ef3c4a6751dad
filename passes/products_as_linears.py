"""Products with a weight that are spelled without a linear: GPT-2's Conv1D, `x @ self.weight`.

    before:  %y = aten.addmm(%bias, %x, %w)         after:  %t = aten.t(%w)
                                                            %y = aten.linear(%x, %t, %bias)

What plans and quantises layers looks for linears.  Both are one kernel call on the same memory, so
every output keeps every bit.
"""

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.graph_edit import aten, insert, shape_of, weight_expressions

_PRODUCTS = (aten.mm.default, aten.matmul.default)


def products_as_linears(program: ExportedProgram) -> int:
    """Make linears of products x @ W and b + x @ W whose W is a weight [K, N], in place.

    Returns:
        How many there were.
    """
    weights = weight_expressions(program)
    count = 0
    for node in list(program.graph.nodes):
        found = None if node in weights else _factors(node)
        if found is None or not _fit(*found, weights):
            continue
        x, weight, bias = found
        with program.graph.inserting_before(node):
            transposed = insert(program.graph, aten.t.default, (weight,), like=node)
        node.target = aten.linear.default
        node.args = (x, transposed) if bias is None else (x, transposed, bias)
        count += 1
    return count


def _factors(node: Node) -> tuple[Node, Node, Node | None] | None:
    """x, W and b of a product; None for any other node."""
    if node.op != "call_function" or node.kwargs:  # factors alpha and beta
        return None
    if node.target is aten.addmm.default:
        bias, x, weight = node.args
    elif node.target in _PRODUCTS:
        (x, weight), bias = node.args, None
    else:
        return None
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    assert bias is None or isinstance(bias, Node)
    return x, weight, bias


def _fit(x: Node, weight: Node, bias: Node | None, weights: set[Node]) -> bool:
    if weight not in weights or x in weights or len(shape_of(weight)) != 2:
        return False
    if bias is None:
        return len(shape_of(x)) > 1
    return bias in weights and shape_of(bias) == shape_of(weight)[1:]
