"""Find the residual stream of a program: the sums through which each layer adds to what came in.

    %norm = norm(%h)
    %branch = linear(gelu(linear(%norm)))
    %sum = add(%h, %branch)                 <- a residual sum: its one addend is made from the other

What is found does not depend on the model's names, nor on whether the norm stands before the branch
(T5, Llama, ViT) or after the sum (BERT).  Sums that are written in place are not found.
"""

from collections.abc import Iterator

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.dtype_ops import HEAVY
from enginecast.passes.graph_edit import aten, is_float, same_shape, shape_of, weight_expressions
from enginecast.passes.match import behind_casts, is_call


def residual_stream(program: ExportedProgram) -> set[Node]:
    """The residual sums, and what is computed from them up to the next weighted sum: norms, scales,
    clamps, activations, and the casts between them.
    """
    found = residual_sums(program)
    waiting = list(found)
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and is_float(user) and user.target not in HEAVY:
                waiting += [user] if user not in found else []
                found.add(user)
    return found


def residual_sums(program: ExportedProgram) -> set[Node]:
    """Every sum of two values of one shape, one of them computed from the other by a layer."""
    weights = weight_expressions(program)
    places = {node: place for place, node in enumerate(program.graph.nodes)}
    return {
        node
        for node in program.graph.nodes
        if is_call(node, aten.add.Tensor)
        and any(_is_layer(*pair, places) for pair in _addends(node, weights))
    }


def _addends(total: Node, weights: set[Node]) -> Iterator[tuple[Node, Node]]:
    """Both orders of the addends, when a residual sum could be made of them."""
    left, right = total.args[:2]
    if not (isinstance(left, Node) and isinstance(right, Node)) or {left, right} & weights:
        return
    if not (is_float(left) and is_float(right)):
        return
    if same_shape(shape_of(left), shape_of(right)):
        yield behind_casts(left), right
        yield behind_casts(right), left


def _is_layer(start: Node, end: Node, places: dict[Node, int]) -> bool:
    """Whether `end` is computed from `start` with a weighted sum on the way."""
    between = _between(start, end, places)
    reached: set[Node] = {start}
    weighted: set[Node] = set()
    for node in sorted(between, key=places.__getitem__):
        sources = set(node.all_input_nodes)
        if sources & reached:
            reached.add(node)
            if node.target in HEAVY or sources & weighted:
                weighted.add(node)
    return end in weighted


def _between(start: Node, end: Node, places: dict[Node, int]) -> set[Node]:
    """`end` and what it is computed from, no further back than `start`."""
    found, waiting = {end}, [end]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found and places[source] > places[start]:
                found.add(source)
                waiting.append(source)
    return found
