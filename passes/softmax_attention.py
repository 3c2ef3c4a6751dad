"""Match attention that is spelled out: matmul, scale, bias and mask, softmax, dropout, matmul."""

from dataclasses import dataclass

from torch.fx import Node

from enginecast.passes.graph_edit import arguments, aten, first_input, shape_of
from enginecast.passes.match import (
    NoMatch,
    behind_casts,
    is_call,
    is_float_cast,
    op_name,
    operands,
    scalar_operand,
    single_user,
)

INERT_AFTER = (aten.dropout.default, aten.contiguous.default)


@dataclass(frozen=True)
class SoftmaxAttention:
    """query, key and value heads first; out is their attention, heads first."""

    query: Node
    key: Node
    value: Node
    bias: tuple[Node, ...]
    scale: float
    out: Node


def match_softmax_attention(softmax: Node) -> SoftmaxAttention:
    """Match the attention around a softmax over the last dim of [batch, heads, tokens, key tokens].

    Raises:
        NoMatch: with the reason why it is not one.
    """
    if softmax.args[1] not in (-1, 3):
        raise NoMatch(softmax, f"the softmax is over dim {softmax.args[1]}, expected the last one")
    out, value = _weighted_sum(softmax)
    scores = softmax.args[0]
    assert isinstance(scores, Node)
    product, scale, biases = _scores(behind_casts(scores))
    query, transposed = product.args[:2]
    assert isinstance(query, Node)
    return SoftmaxAttention(query, _key(transposed), value, biases, scale, out)


def _weighted_sum(softmax: Node) -> tuple[Node, Node]:
    node = single_user(softmax, where="after the softmax")
    while is_float_cast(node) or is_call(node, *INERT_AFTER):
        if is_call(node, aten.dropout.default) and node.args[2] is not False:
            raise NoMatch(node, "dropout of the attention weights is active")
        node = single_user(node, where="after the softmax")
    if not is_call(node, aten.matmul.default):
        raise NoMatch(node, f"{op_name(node)} reads the attention weights, expected matmul")
    value = node.args[1]
    assert isinstance(value, Node)
    if len(shape_of(value)) != 4:
        raise NoMatch(value, f"the value has rank {len(shape_of(value))}, expected 4")
    return node, value


def _scores(node: Node) -> tuple[Node, float, tuple[Node, ...]]:
    """The product of query and key, the scale, and what is added to the scaled scores."""
    biases: list[Node] = []
    while is_call(node, aten.add.Tensor):
        scores, bias = _split_bias(node)
        biases.insert(0, bias)
        node = behind_casts(scores)
    scale = 1.0
    while (split := _split_factor(node)) is not None:
        single_user(node, where="as the scores")
        node, scale = behind_casts(split[0]), scale * split[1]
    if not is_call(node, aten.matmul.default):
        raise NoMatch(node, f"the scores come from {op_name(node)}, expected matmul")
    single_user(node, where="as the scores")
    return node, scale, tuple(biases)


def _split_factor(node: Node) -> tuple[Node, float] | None:
    factor = scalar_operand(node, aten.mul.Tensor)
    divisor = scalar_operand(node, aten.div.Tensor)
    if divisor is not None and divisor[0] is node.args[0]:
        return divisor[0], 1.0 / divisor[1]
    return factor


def _split_bias(node: Node) -> tuple[Node, Node]:
    """Which addend holds the scores: the one that a matmul of this attention made."""
    if node.kwargs:
        raise NoMatch(node, "a bias is added with a factor (alpha)")
    for scores, bias in operands(node):
        if isinstance(scores, Node) and isinstance(bias, Node) and _holds_scores(scores):
            single_user(node, where="between the scores and the softmax")
            return scores, bias
    raise NoMatch(node, "neither addend of the scores comes from the product of query and key")


def _holds_scores(node: Node) -> bool:
    node = behind_casts(node)
    while is_call(node, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
        source = node.args[0]
        if not isinstance(source, Node):
            return False
        node = behind_casts(source)
    return is_call(node, aten.matmul.default)


def _key(transposed: object) -> Node:
    if is_call(transposed, aten.transpose.int) and (
        sorted(dim % 4 for dim in arguments(transposed)[1:3]) == [2, 3]
    ):
        return first_input(transposed)
    if is_call(transposed, aten.permute.default):
        turned = list(arguments(transposed)[1]) == [0, 2, 3, 1]
        inner = _swapped_heads(first_input(transposed)) if turned else None
        if inner is not None:
            return inner
    assert isinstance(transposed, Node)
    raise NoMatch(transposed, f"the key comes from {op_name(transposed)}, expected its transpose")


def _swapped_heads(source: Node) -> Node | None:
    """A key [batch, tokens, heads, size] whose heads-first form some other node holds already."""
    for user in source.users:
        if is_call(user, aten.transpose.int) and sorted(arguments(user)[1:3]) == [1, 2]:
            return user
    return None
