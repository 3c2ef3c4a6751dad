"""Rules that replace one node by a simpler value with the same bits.

A rule takes the program and a node of its op; it returns the node to use instead, or None.  New
nodes go before the old one.  Whether the other strides of the new value matter is asked elsewhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.graph_edit import (
    aten,
    dtype_of,
    first_input,
    insert,
    same_shape,
    same_size,
    shape_of,
    value,
)
from enginecast.passes.match import CASTS, is_call
from enginecast.passes.ranges import always
from enginecast.passes.written import may_alias

Rule = Callable[[ExportedProgram, Node], Node | None]


def drop_inert_dropout(program: ExportedProgram, node: Node) -> Node | None:
    """dropout(x, p, train=False) is x."""
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return None if training else first_input(node)


def drop_alias(program: ExportedProgram, node: Node) -> Node | None:
    """detach, alias and lift of a value that is not trained are the value."""
    return first_input(node)


def drop_noop_cast(program: ExportedProgram, node: Node) -> Node | None:
    """A cast to the dtype that the value has already."""
    source = first_input(node)
    return source if dtype_of(source) == dtype_of(node) and _same_device(source, node) else None


def collapse_exact_casts(program: ExportedProgram, node: Node) -> Node | None:
    """to(to(x: f16, f32), f16) is x: the way up loses nothing, so neither does the way back."""
    middle = first_input(node)
    if not is_call(middle, *CASTS):
        return None
    origin = first_input(middle)
    narrow, wide = dtype_of(origin), dtype_of(middle)
    if narrow is None or wide is None or dtype_of(node) != narrow:
        return None
    return origin if _holds_exactly(wide, narrow) else None


def _holds_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` is one of the float dtype `wide`."""
    if not wide.is_floating_point:
        return False
    if narrow.is_floating_point:
        return torch.promote_types(narrow, wide) == wide
    if narrow == torch.bool:
        return True
    # A float counts exactly up to 2 / eps.
    return not narrow.is_complex and torch.iinfo(narrow).max <= 2 / torch.finfo(wide).eps


def drop_contiguous(program: ExportedProgram, node: Node) -> Node | None:
    """Strides are not part of a value."""
    return first_input(node)


def drop_noop_view(program: ExportedProgram, node: Node) -> Node | None:
    """A reshape, view or expand to the shape that the value has already.

    So is the squeeze of a dimension that is not one: torch leaves it, ONNX refuses it.
    """
    source = first_input(node)
    return source if same_shape(shape_of(source), shape_of(node)) else None


def drop_additive_zero(program: ExportedProgram, node: Node) -> Node | None:
    """x + 0 of an integer (of a float it would turn -0 into 0)."""
    source, other = first_input(node), node.args[1]
    dtype = dtype_of(source)
    if dtype is None or dtype.is_floating_point or dtype != dtype_of(node):
        return None
    return source if type(other) is int and other == 0 else None


def drop_broadcast_before_broadcast(program: ExportedProgram, node: Node) -> Node | None:
    """An expand whose users broadcast it again, all to the shape they have anyway."""
    source = first_input(node)
    return source if _users_broadcast(node, source) else None


def drop_true_and(program: ExportedProgram, node: Node) -> Node | None:
    """`always true & x` is x, where x has the result's shape or the users broadcast it anyway."""
    for known, other in (node.args[:2], node.args[1::-1]):
        if not (isinstance(known, Node) and isinstance(other, Node)):
            continue
        if not dtype_of(other) == dtype_of(node) == torch.bool or always(known) is not True:
            continue
        if same_shape(shape_of(other), shape_of(node)) or _users_broadcast(node, other):
            return other
    return None


def _users_broadcast(node: Node, smaller: Node) -> bool:
    """Whether every user gives the same shape when it reads `smaller`, which broadcasts to node."""
    return bool(node.users) and all(_user_broadcasts(user, node, smaller) for user in node.users)


def _user_broadcasts(user: Node, node: Node, smaller: Node) -> bool:
    if is_call(user, aten.scaled_dot_product_attention.default):
        return user.args[3:4] == (node,) and node not in user.args[:3]
    if not is_call(user, *BROADCASTING):
        return False
    others = [shape_of(s) for s in user.all_input_nodes if s is not node and _is_tensor(s)]
    return same_shape(broadcast(shape_of(smaller), *others), shape_of(user))


def index_of_full_ranges(program: ExportedProgram, node: Node) -> Node | None:
    """x[arange(n0)[:, None, None, None], arange(n1)] reads x whole: it is x with unit dims between.

    transformers' mask code spells a padding mask's broadcast this way; ONNX needs some twenty nodes
    for it.
    """
    source, indices = node.args[:2]
    assert isinstance(source, Node)
    assert isinstance(indices, list | tuple)
    rank = len(shape_of(source))
    if len(indices) != rank or not all(isinstance(i, Node) for i in indices):
        return None
    result_rank = len(shape_of(node))
    places: list[int] = []
    for dim, index in enumerate(indices):
        place = _full_range_place(index, shape_of(source)[dim], result_rank)
        if place is None:
            return None
        places.append(place)
    if places != sorted(set(places)):
        return None
    with program.graph.inserting_before(node):
        result = source
        for dim in range(result_rank):
            if dim not in places:
                result = insert(program.graph, aten.unsqueeze.default, (result, dim), like=node)
    return result


def _full_range_place(index: Any, size: Any, result_rank: int) -> int | None:
    """The result dim along which an index runs through 0..size-1, all its other dims being 1."""
    shape = shape_of(index)
    long = [d for d, s in enumerate(shape) if not same_size(s, 1)]
    if len(long) != 1 or not same_size(shape[long[0]], size):
        return None
    node = index
    while is_call(node, aten.unsqueeze.default, aten.view.default, aten.reshape.default):
        node = node.args[0]
    if not is_call(node, aten.arange.default) or not same_size(shape_of(node)[0], size):
        return None
    return result_rank - len(shape) + long[0]


def functionalise(program: ExportedProgram, node: Node) -> Node | None:
    """add_(x, y) is add(x, y) where nothing else sees x: x was made here and has one user."""
    out_of_place = OUT_OF_PLACE[node.target]
    source = first_input(node)
    fresh = source.op == "call_function" and list(source.users) == [node]
    if not fresh or may_alias(source) or dtype_of(source) != dtype_of(node):
        return None
    with program.graph.inserting_before(node):
        return insert(program.graph, out_of_place, node.args, dict(node.kwargs), like=node)


def broadcast(*shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The broadcast of symbolic shapes, by torch's rules, without adding guards."""
    rank = max(map(len, shapes))
    result: list[Any] = [1] * rank
    for shape in shapes:
        for place, size in enumerate(shape, start=rank - len(shape)):
            if not same_size(size, 1):
                result[place] = size
    return tuple(result)


def _is_tensor(node: Node) -> bool:
    return isinstance(value(node), torch.Tensor)


def _same_device(left: Node, right: Node) -> bool:
    return bool(value(left).device == value(right).device)


OUT_OF_PLACE: dict[Any, Any] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.relu_.default: aten.relu.default,
    aten.clamp_.default: aten.clamp.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
}
BROADCASTING = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.where.self,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.__and__.Tensor,
        aten.bitwise_and.Tensor,
        aten.masked_fill.Scalar,
    }
)
_CAST_RULES: tuple[Rule, ...] = (drop_noop_cast, collapse_exact_casts)
RULES: dict[Any, tuple[Rule, ...]] = {
    aten.dropout.default: (drop_inert_dropout,),
    aten.detach.default: (drop_alias,),
    aten.detach_.default: (drop_alias,),
    aten.alias.default: (drop_alias,),
    aten.lift_fresh_copy.default: (drop_alias,),
    **dict.fromkeys(CASTS, _CAST_RULES),
    aten.contiguous.default: (drop_contiguous,),
    aten.view.default: (drop_noop_view,),
    aten.squeeze.dim: (drop_noop_view,),
    aten.squeeze.dims: (drop_noop_view,),
    aten.reshape.default: (drop_noop_view,),
    aten.expand.default: (drop_noop_view, drop_broadcast_before_broadcast),
    aten.add.Tensor: (drop_additive_zero,),
    aten.__and__.Tensor: (drop_true_and,),
    aten.bitwise_and.Tensor: (drop_true_and,),
    aten.logical_and.default: (drop_true_and,),
    aten.index.Tensor: (index_of_full_ranges,),
    **dict.fromkeys(OUT_OF_PLACE, (functionalise,)),
}
