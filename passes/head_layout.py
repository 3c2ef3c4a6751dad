"""The views between [batch, tokens, heads * size] and [batch, heads, tokens, size] around an
attention.
"""

from torch.fx import Node

from enginecast.passes.graph_edit import arguments, aten, first_input, same_size, shape_of
from enginecast.passes.match import is_call, real_users

VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)
COPIES = (aten.contiguous.default, aten.clone.default)


def swaps_heads_and_tokens(node: Node) -> bool:
    """Whether a node makes [batch, heads, tokens, size] of [batch, tokens, heads, size], or the
    reverse.
    """
    if is_call(node, aten.transpose.int):
        return sorted(dim % 4 for dim in arguments(node)[1:3]) == [1, 2]
    return is_call(node, aten.permute.default) and list(arguments(node)[1]) == [0, 2, 1, 3]


def split_heads(node: Node) -> Node | None:
    """The value [batch, tokens, heads * size] that was split into heads to make this one; None when
    it was not.
    """
    while is_call(node, *COPIES):
        node = first_input(node)
    if not swaps_heads_and_tokens(node):
        return None
    split = first_input(node)
    if not is_call(split, *VIEWS):
        return None
    flat = first_input(split)
    batch, tokens, heads, size = shape_of(split)
    shape = shape_of(flat)
    fits = len(shape) == 3 and same_size(shape[0], batch) and same_size(shape[1], tokens)
    return flat if fits and same_size(shape[2], heads * size) else None


def joined_output(node: Node) -> Node | None:
    """The node that joins this one's heads again, when every user goes there; None otherwise."""
    users = real_users(node)
    while len(users) == 1 and is_call(users[0], *COPIES):
        users = real_users(users[0])
    if len(users) != 1 or not swaps_heads_and_tokens(users[0]):
        return None
    users = real_users(users[0])
    while len(users) == 1 and is_call(users[0], *COPIES):
        users = real_users(users[0])
    if len(users) != 1 or not is_call(users[0], *VIEWS):
        return None
    batch, heads, tokens, size = shape_of(node)
    shape = shape_of(users[0])
    fits = len(shape) == 3 and same_size(shape[0], batch) and same_size(shape[1], tokens)
    return users[0] if fits and same_size(shape[2], heads * size) else None


def unrepeated(node: Node) -> Node:
    """Keys or values before `repeat_kv`: reshape(expand(unsqueeze(x, 2))) over [batch, kv heads,
    tokens, size].
    """
    if not is_call(node, *VIEWS):
        return node
    expanded = first_input(node)
    while is_call(expanded, *COPIES):
        expanded = first_input(expanded)
    if not is_call(expanded, aten.expand.default):
        return node
    unsqueezed = first_input(expanded)
    while is_call(unsqueezed, aten.slice.Tensor):
        unsqueezed = first_input(unsqueezed)
    if not is_call(unsqueezed, aten.unsqueeze.default) or unsqueezed.args[1] != 2:
        return node
    source = first_input(unsqueezed)
    shape, repeated = shape_of(source), shape_of(expanded)
    plain = len(shape) == 4 and len(repeated) == 5
    if not plain or not same_size(shape_of(node)[1], shape[1] * repeated[2]):
        return node
    kept = all(same_size(a, b) for a, b in zip(shape[2:], repeated[3:], strict=True))
    return source if kept else node
