"""Find the residual streams of a program, whatever its modules are called.

    %norm = norm(%h)
    %branch = linear(gelu(linear(%norm)))
    %sum = add(%h, %branch)                 <- a residual sum: its one addend is made from the other

Residual sums are found by that alone: the norm may stand before the branch (T5, Llama, ViT) or
after the sum (BERT).  Sums that are made in place are not found.
"""

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.edit import aten, is_float, same_shape, shape_of, weight_expressions
from enginecast.passes.ir.match import behind_casts, is_call
from enginecast.passes.ir.traits import Trait, has

SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
RANKS = (2, 3)
"""Ranks of a residual stream that the op supports; a normalized rotary query has rank 4."""


def residual_stream(program: ExportedProgram) -> set[Node]:
    """The residual sums, and what is computed from them up to the next weighted sum: norms, scales,
    clamps, activations, and the casts between them.
    """
    stream = residual_sums(program)
    waiting = list(stream)
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and is_float(user) and not has(user, Trait.HEAVY):
                waiting += [user] if user not in stream else []
                stream.add(user)
    return stream


def residual_sums(program: ExportedProgram) -> set[Node]:
    """Every sum of two values of one shape, one of them computed from the other by a layer."""
    weights = weight_expressions(program)
    sums = set()
    for node in program.graph.nodes:
        left, right = node.args[:2] if is_call(node, *SUMS) else (None, None)
        if not (is_float(left) and is_float(right)) or {left, right} & weights:
            continue
        assert isinstance(left, Node)
        assert isinstance(right, Node)
        if same_shape(shape_of(left), shape_of(right)) and (
            _is_layer(behind_casts(left), right) or _is_layer(behind_casts(right), left)
        ):
            sums.add(node)
    return sums


def _is_layer(start: Node, end: Node) -> bool:
    """Whether `end` is computed from `start` with a weighted sum on the way."""
    waiting, seen = [(end, False)], set()
    while waiting:
        node, weighted = waiting.pop()
        weighted = weighted or has(node, Trait.HEAVY)
        for source in node.all_input_nodes:
            if source is start and weighted:
                return True
            if source > start and (source, weighted) not in seen:
                seen.add((source, weighted))
                waiting.append((source, weighted))
    return False
