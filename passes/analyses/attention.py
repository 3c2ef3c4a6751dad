"""Find attention written out in plain ops, and the views around its heads.

Heads first is [batch, heads, tokens, size], tokens first [batch, tokens, heads * size].
"""

from torch.fx import Node

from enginecast.passes.ir.edit import arguments, aten, first_input, same_shape, shape_of
from enginecast.passes.ir.match import NoMatch, is_call, is_float_cast, op_name
from enginecast.passes.ir.pattern import (
    Number,
    Pattern,
    Through,
    Value,
    casts,
    either,
    identities,
    op,
    pattern,
    repeat,
    through,
)
from enginecast.passes.ir.traits import Trait, has

_matmul, _softmax = op(aten.matmul.default), op(aten.softmax.int)
_expand, _unsqueeze = op(aten.expand.default), op(aten.unsqueeze.default)
_view = op(Trait.RESHAPES)
_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default)
_KEEPS = (Trait.IDENTITY, Trait.CASTS, Trait.ELEMENTWISE, Trait.RESHAPES, Trait.PERMUTES)


def is_attention_core(node: Node) -> bool:
    """A fused attention call, or a softmax over scores [batch, heads, tokens, key tokens] whose
    weights multiply values: not one over classes.
    """
    if is_call(node, aten.scaled_dot_product_attention.default):
        return True
    return is_call(node, aten.softmax.int) and len(shape_of(node)) == 4 and _weighs(node)


def _weighs(weights: Node) -> bool:
    """Whether attention weights, perhaps changed one by one or viewed, go into a product."""
    seen, left = {weights}, [weights]
    while left:
        for user in left.pop().users:
            if is_call(user, *_PRODUCTS):
                return True
            if user not in seen and has(user, *_KEEPS):
                seen.add(user)
                left.append(user)
    return False


@pattern
def softmax_attention(
    query: Value, key: Value, value: Value, bias: Value, factor: Number, divisor: Number
) -> Pattern:
    """Pattern of softmax(query @ key * scale + biases) @ value, heads first, with a transposed key;
    the site is the softmax.
    """
    product = _matmul(query, key).otherwise("the scores come from {op}, expected matmul")
    scaled = repeat(
        product.once("as the scores"),
        lambda scores: either(casts(scores) * factor.each(), casts(scores) / divisor.each()).once(
            "as the scores"
        ),
    )
    biased = repeat(
        scaled,
        lambda scores: (
            (casts(scores) + bias.each())
            .otherwise("a bias is added with a factor (alpha)")
            .once("between the scores and the softmax")
        ),
    )
    weights = _softmax(casts(biased)).where(
        lambda node: node.args[1] in (-1, 3),
        lambda node: f"the softmax is over dim {node.args[1]}, expected the last one",
    )
    kept = Through(
        weights.site().once("after the softmax"),
        lambda node: is_float_cast(node) or has(node, Trait.IDENTITY),
    ).where(
        lambda node: not is_call(node, aten.dropout.default) or arguments(node)[2] is False,
        "dropout of the attention weights is active",
    )
    return _matmul(kept.once("after the softmax"), value).otherwise(
        "{op} reads the attention weights, expected matmul"
    )


def untransposed(key: Node, before: Node) -> Node:
    """The key, heads first, from its transpose [batch, heads, size, tokens]; it stands in front of
    `before`.

    Raises:
        NoMatch: the node is not the transpose of a key.
    """
    order = _order(key)
    if order == [0, 1, 3, 2]:
        return first_input(key)
    if order == [0, 2, 3, 1]:  # from tokens first; some other node may hold it heads first already
        for user in first_input(key).users:
            if swaps_heads_and_tokens(user) and user < before:
                return user
    raise NoMatch(key, f"the key comes from {op_name(key)}, expected its transpose")


def swaps_heads_and_tokens(node: Node) -> bool:
    """Whether it swaps tokens and heads of [batch, tokens, heads, size], either way."""
    return _order(node) == [0, 2, 1, 3]


def _order(node: Node) -> list[int]:
    """The permutation of a node's four dims; empty if it is not a transpose."""
    if is_call(node, aten.permute.default):
        return list(arguments(node)[1])
    order = [0, 1, 2, 3]
    if not is_call(node, aten.transpose.int):
        return []
    left, right = (dim % 4 for dim in arguments(node)[1:3])
    order[left], order[right] = right, left
    return order


def _swapped(inner: Pattern) -> Pattern:
    swap = op(aten.transpose.int, aten.permute.default)(inner)
    return swap.where(swaps_heads_and_tokens, "other dims")


@pattern
def _split(flat: Value) -> Pattern:
    return identities(_swapped(_view(flat).named("split")))


@pattern
def _joined(heads: Value) -> Pattern:
    copied = identities(heads.site().once("as heads")).once("as heads")
    return _view(identities(_swapped(copied).once("as heads")).once("as heads"))


@pattern
def _repeated(source: Value) -> Pattern:
    """`repeat_kv`: reshape(expand(unsqueeze(x, 2))) over [batch, kv heads, tokens, size]."""
    fifth = _unsqueeze(source).where(lambda node: 2 in node.args[1:], "another dim")
    return _view(identities(_expand(through(fifth, aten.slice.Tensor)).named("expanded")))


def split_heads(node: Node) -> Node | None:
    """The value, tokens first, that was split into heads to make this one, if any."""
    match = _split.find(node)
    if match is None:
        return None
    batch, tokens, heads, size = shape_of(match.node("split"))
    flat = match.node("flat")
    return flat if _is_flat(flat, batch, tokens, heads * size) else None


def joined_output(node: Node) -> Node | None:
    """The node that joins this one's heads again, if all users lead there; else None."""
    match = _joined.find(node)
    if match is None:
        return None
    batch, heads, tokens, size = shape_of(node)
    return match.root if _is_flat(match.root, batch, tokens, heads * size) else None


def unrepeated(node: Node) -> Node:
    """Keys or values before they were repeated for grouped-query attention."""
    match = _repeated.find(node)
    if match is None:
        return node
    source, expanded = match.node("source"), match.node("expanded")
    if len(shape_of(source)) != 4 or len(shape_of(expanded)) != 5:
        return node
    batch, heads, tokens, size = shape_of(source)
    copies = shape_of(expanded)[2]
    # Whole keys, each head `copies` times: neither a slice nor another dim that expand repeats.
    steps = (
        (first_input(expanded), (batch, heads, 1, tokens, size)),
        (expanded, (batch, heads, copies, tokens, size)),
        (node, (batch, heads * copies, tokens, size)),
    )
    return source if all(same_shape(shape_of(step), shape) for step, shape in steps) else node


def _is_flat(node: Node, batch: object, tokens: object, width: object) -> bool:
    return same_shape(shape_of(node), (batch, tokens, width))
