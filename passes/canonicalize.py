"""Bring a program into one canonical form, so that every later pass has one spelling to match.

    before:  %drop = aten.dropout(%x, 0.1, False)          after:  (gone)
             %to = aten.to.dtype(%x: f32, f32)                     (gone)
             %a = aten.arange(%s)  %b = aten.arange(%s)            %a = aten.arange(%s)
             %m = aten.index(%mask, [%rows, %columns])             %m = aten.unsqueeze(%mask, 1)

Exact: every output keeps every bit.  Left alone: a cast that changes the dtype, dropout in training
mode, anything random, a copy whose strides reach an op that rounds by them.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.passes.analyses.ranges import always
from enginecast.passes.analyses.strides import may_change_bits, take_strides
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import (
    add_weight,
    aten,
    drop_unused_weights,
    dtype_of,
    erase_dead,
    first_input,
    free_name,
    insert,
    same_shape,
    same_size,
    shape_of,
    value,
    weight_specs,
    weight_value,
)
from enginecast.passes.ir.effects import is_pure
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.lower.merge_equal import merge_equal


@dataclass(frozen=True)
class Canonicalize(GraphPass):
    """Remove ops without effect, fold constants, merge equal values."""

    name: ClassVar[str] = "canonicalize"
    # A no-op cast in an fp32 program says where the source wants fp32: unify-dtype must read it
    # before it goes.
    after: ClassVar[frozenset[str]] = frozenset({"unify-dtype"})
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        changed = True
        while changed:
            changed = _sweep(program, log)
        drop_unused_weights(program)
        return log.sites


def _sweep(program: ProgramView, log: SiteLog) -> bool:
    """Apply every rule once over the graph; whether anything changed."""
    before = len(log.sites)
    for node in list(program.graph.nodes):
        if node.op != "call_function":
            continue
        for rule in _CAST_RULES if has(node, Trait.CASTS) else RULES.get(node.target, ()):
            replacement = rule(program, node)
            if replacement is None:
                continue
            # A smaller one is broadcast by its users as they did with the other.
            is_whole = same_shape(shape_of(node), shape_of(replacement))
            if is_whole and may_change_bits(node, value(replacement)):
                continue
            if log.skipped(node):
                continue
            log.done(node, rule.__name__.replace("_", " "))
            take_strides(node, value(replacement))
            node.replace_all_uses_with(replacement)
            program.graph.erase_node(node)
            break
    fold_constants(program, log)
    merge_equal(program, log)
    erase_dead(program.graph)
    return len(log.sites) > before


Rule = Callable[[ProgramView, Node], Node | None]
"""Takes a node of its op and returns a replacement with the same bits, or None. New nodes go before
the old one. `_sweep` checks whether other strides of the new value matter."""


def drop_inert_dropout(program: ProgramView, node: Node) -> Node | None:
    """dropout(x, p, train=False) is x."""
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return None if training else first_input(node)


def drop_alias(program: ProgramView, node: Node) -> Node | None:
    """detach, alias and lift of a value that is not trained are the value."""
    return first_input(node)


def drop_noop_cast(program: ProgramView, node: Node) -> Node | None:
    """Remove a cast to the dtype that the value already has."""
    source = first_input(node)
    same = dtype_of(source) == dtype_of(node) and value(source).device == value(node).device
    return source if same else None


def collapse_exact_casts(program: ProgramView, node: Node) -> Node | None:
    """to(to(x: f16, f32), f16) is x: the way up loses nothing, so neither does the way back."""
    middle = first_input(node)
    if not has(middle, Trait.CASTS):
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
    if narrow.is_floating_point:  # promote_types knows no fp8
        low, high = torch.finfo(narrow), torch.finfo(wide)
        fits = low.max <= high.max and low.eps >= high.eps
        return fits and low.smallest_normal * low.eps >= high.smallest_normal * high.eps
    if narrow == torch.bool:
        return True
    # A float counts exactly up to 2 / eps.
    return not narrow.is_complex and torch.iinfo(narrow).max <= 2 / torch.finfo(wide).eps


def drop_contiguous(program: ProgramView, node: Node) -> Node | None:
    """Remove `contiguous`: strides are not part of a value."""
    return first_input(node)


def drop_noop_view(program: ProgramView, node: Node) -> Node | None:
    """Remove a reshape, view or expand to the shape that the value already has.

    Also remove a squeeze of a dimension of another size than 1: torch ignores it, ONNX refuses it.
    """
    source = first_input(node)
    return source if same_shape(shape_of(source), shape_of(node)) else None


def drop_additive_zero(program: ProgramView, node: Node) -> Node | None:
    """x + 0 of an integer (of a float it would turn -0 into 0)."""
    source, other = first_input(node), node.args[1]
    dtype = dtype_of(source)
    if dtype is None or dtype.is_floating_point or dtype != dtype_of(node):
        return None
    return source if type(other) is int and other == 0 else None


def drop_broadcast_before_broadcast(program: ProgramView, node: Node) -> Node | None:
    """Remove an expand whose users all broadcast the value to the same shape anyway."""
    source = first_input(node)
    return source if _users_broadcast(node, source) else None


def drop_true_and(program: ProgramView, node: Node) -> Node | None:
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
    """Whether every user returns the same shape if it reads `smaller`, which broadcasts to node."""
    return bool(node.users) and all(_user_broadcasts(user, node, smaller) for user in node.users)


def _user_broadcasts(user: Node, node: Node, smaller: Node) -> bool:
    if is_call(user, aten.scaled_dot_product_attention.default):
        return user.args[3:4] == (node,) and node not in user.args[:3]
    if not has(user, Trait.ELEMENTWISE | Trait.CORRECTLY_ROUNDED):
        return False
    others = [s for s in user.all_input_nodes if s is not node and isinstance(value(s), Tensor)]
    if not shape_of(smaller) and any(
        dtype_of(other) not in (dtype_of(smaller), torch.bool) for other in others
    ):
        return False  # dtype promotion ignores a zero-dim tensor next to one with dims
    return same_shape(broadcast(shape_of(smaller), *map(shape_of, others)), shape_of(user))


def index_of_full_ranges(program: ProgramView, node: Node) -> Node | None:
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
    pairs = zip(indices, shape_of(source), strict=True)
    places = [_full_range_place(index, size, result_rank) for index, size in pairs]
    if places != sorted({place for place in places if place is not None}):
        return None
    with program.graph.inserting_before(node):
        result = source
        for dim in range(result_rank):
            if dim not in places:
                result = insert(program.graph, aten.unsqueeze.default, (result, dim), like=node)
    return result


def _full_range_place(index: Any, size: Any, result_rank: int) -> int | None:
    """The result dim along which an index is 0..size-1 while its other dims have size 1."""
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


def broadcast(*shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The broadcast of symbolic shapes, by torch's rules, without adding guards."""
    rank = max(map(len, shapes))
    result: list[Any] = [1] * rank
    for shape in shapes:
        for place, size in enumerate(shape, start=rank - len(shape)):
            if not same_size(size, 1):
                result[place] = size
    return tuple(result)


_CAST_RULES: tuple[Rule, ...] = (drop_noop_cast, collapse_exact_casts)
RULES: dict[Any, tuple[Rule, ...]] = {
    aten.dropout.default: (drop_inert_dropout,),
    aten.detach.default: (drop_alias,),
    aten.detach_.default: (drop_alias,),
    aten.alias.default: (drop_alias,),
    aten.lift_fresh_copy.default: (drop_alias,),
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
}


LARGEST = 4096
"""Most elements of a folded tensor: a larger one costs less to compute than to store."""


def fold_constants(
    program: ProgramView,
    log: SiteLog,
    *,
    among: Container[Node] | None = None,
    largest: int = LARGEST,
) -> None:
    """Replace maximal constant expressions by lifted constants.

    A constant expression reads nothing but literals and lifted constants.  Parameters and buffers
    stay as they are: the exporter evaluates their expressions while it writes them.

    Args:
        among: the nodes that may be folded; None: all.
        largest: most elements of a folded tensor.
    """
    constants = _constant_expressions(program, among, largest)
    for node in list(program.graph.nodes):
        if not _is_end(node, constants) or log.skipped(node):
            continue
        # In order, and no view: a lifted constant is stored whole.
        tensor = weight_value(program, node).clone(memory_format=torch.contiguous_format)
        name = free_name(program, f"folded.{node.name}")
        folded = add_weight(program, name, tensor, InputKind.CONSTANT_TENSOR)
        log.done(node, "fold constants")
        take_strides(node, value(folded))
        node.replace_all_uses_with(folded)
        program.graph.erase_node(node)


def _constant_expressions(
    program: ProgramView, among: Container[Node] | None, largest: int
) -> set[Node]:
    specs = weight_specs(program).items()
    lifted = {name for name, spec in specs if spec.kind is InputKind.CONSTANT_TENSOR}
    constants: set[Node] = set()
    for node in program.graph.nodes:
        known = node.name in lifted if node.op == "placeholder" else _foldable(node, largest)
        known = known and (among is None or node.op == "placeholder" or node in among)
        if known and constants.issuperset(node.all_input_nodes):
            constants.add(node)
    for node in reversed(program.graph.nodes):
        # A lifted constant lies in order: what its strides matter to stays.
        if _is_end(node, constants) and may_change_bits(node, value(node).contiguous()):
            constants.discard(node)
    return constants


def _is_end(node: Node, constants: set[Node]) -> bool:
    """Whether a call is a constant that something else reads."""
    inside = node in constants and node.op == "call_function" and isinstance(value(node), Tensor)
    return inside and not constants.issuperset(node.users)


def _foldable(node: Node, largest: int) -> bool:
    if not is_pure(node) or has(node, Trait.RANDOM, Trait.UNFOLDABLE):
        return False
    result = value(node)
    several = result if isinstance(result, tuple | list) and result else [result]
    return all(
        isinstance(each, Tensor)
        and all(isinstance(size, int) for size in each.shape)
        and each.numel() <= largest
        for each in several
    )
