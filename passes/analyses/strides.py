"""Where changed strides propagate: a value with another memory layout has the same elements, but
results computed from it may round differently.

Products, convolutions, sums and norms take another kernel for other strides, which adds in another
order; even an elementwise op such as GELU computes the elements that fill a vector and the rest by
two formulas.  So strides may change where they reach nothing but ops that give every element the
same bits wherever it lies, and ops that copy into strides of their own.
"""

import heapq
import operator
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    evaluate_fake,
    is_float,
    same_shape,
    same_size,
    value,
)
from enginecast.passes.ir.effects import is_pure, may_alias
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.traits import Trait, has


def may_change_bits(node: Node, other: Any) -> bool:
    """Whether bits may change somewhere when `other` takes the place of a node's value.

    Args:
        other: a fake value of the same shape and dtype, perhaps with other strides.
    """
    return any(result is None for _, result in _changes(node, other))


def take_strides(node: Node, other: Any) -> None:
    """Let the values of all that read a node follow, as `other` takes the place of its value."""
    for user, result in _changes(node, other):
        if result is not None:
            user.meta["val"] = result


def loosen_views(node: Node) -> None:
    """Let the views of a node copy where they have to: its strides are to change.

    A `view` fails where a copy would be needed, and a `reshape` copies.
    """
    for user in node.users:
        if is_call(user, aten.view.default, aten._unsafe_view.default):
            user.target = aten.reshape.default
        if user.op == "call_function" and may_alias(user):
            loosen_views(user)


def _changes(node: Node, other: Any) -> Iterator[tuple[Node, Any]]:
    """The later nodes that other strides reach, each with its new value, or None where bits may
    depend on them.
    """
    if _same_strides(value(node), other):
        return
    changed, seen, waiting = {node: other}, {node}, list(node.users)
    heapq.heapify(waiting)  # by their place in the graph: each comes after all that it reads
    while waiting:
        user = heapq.heappop(waiting)
        if user in seen or user.op == "output" or _is_blind(user):
            continue
        seen.add(user)
        if not _is_indifferent(user, changed):
            yield user, None
            continue
        try:
            with _without_guards(user):
                result = evaluate_fake(user, changed)
        except RuntimeError:  # sizes that are known at run time only: undecided is not the same
            yield user, None
            continue
        if not _same_strides(value(user), result):
            yield user, result
            changed[user] = result
            for reader in user.users:
                heapq.heappush(waiting, reader)


def _is_indifferent(node: Node, changed: Mapping[Node, Any]) -> bool:
    """Whether an op gives every element the same bits wherever its changed inputs lie."""
    if is_call(node, aten.scaled_dot_product_attention.default):
        # The mask is added, element by element.
        return changed.keys().isdisjoint(arguments(node)[:3])
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or has(node, Trait.STRIDE_BOUND):
        return False
    if has(node, Trait.CORRECTLY_ROUNDED):
        return not _is_complex(node)
    if has(node, Trait.HEAVY) or not is_pure(node):
        return False
    if has(node, Trait.EXACT, Trait.CASTS):
        return True
    if has(node, Trait.ELEMENTWISE):
        return not _is_complex(node) and not is_float(node)
    return may_alias(node)


def _is_blind(node: Node) -> bool:
    """Whether a node reads sizes at most."""
    return has(node, Trait.METADATA) and not isinstance(value(node), Tensor)


def _is_complex(node: Node) -> bool:
    """Whether an op computes with complex numbers, whose products are sums."""
    dtypes = [dtype_of(source) for source in (node, *node.all_input_nodes)]
    return any(dtype is not None and dtype.is_complex for dtype in dtypes)


def _without_guards(node: Node) -> AbstractContextManager[None]:
    """Sizes that an op asks for are those of the trace meanwhile, and nothing is noted of them."""
    for source in node.all_input_nodes:
        found = value(source)
        if isinstance(found, FakeTensor) and found.fake_mode.shape_env is not None:
            guards: AbstractContextManager[None] = found.fake_mode.shape_env.suppress_guards()
            return guards
    return nullcontext()


def _same_strides(left: Any, right: Any) -> bool:
    """Whether two values lie in memory alike for every allowed input, decided without a guard."""
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(_same_strides, left, right))
    if isinstance(left, Tensor):
        return same_shape(left.stride(), right.stride())
    return same_size(left, right)
