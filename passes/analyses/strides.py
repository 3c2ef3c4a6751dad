"""Find where changed strides propagate: a value with another memory layout has the same elements,
but results computed from it may round differently.

Products, convolutions, sums and norms use another kernel for other strides, with another order of
summation. Even an elementwise op such as GELU uses different formulas for full vectors and the
remainder. So strides may change only if they reach nothing but ops whose bits do not depend on
layout, and ops that copy into their own strides.
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
    """Whether replacing a node's value by `other` may change any bits downstream.

    Args:
        other: a fake value of the same shape and dtype, perhaps with other strides.
    """
    return any(result is None for _, result in _changes(node, other))


def take_strides(node: Node, other: Any) -> None:
    """Replace a node's fake value by `other` and update the values downstream."""
    for user, result in _changes(node, other):
        if result is not None:
            user.meta["val"] = result


def loosen_views(node: Node) -> None:
    """Turn the views of a node into reshapes, before its strides change.

    A `view` fails where a copy would be needed, and a `reshape` copies.
    """
    for user in node.users:
        if is_call(user, aten.view.default, aten._unsafe_view.default):
            user.target = aten.reshape.default
        if user.op == "call_function" and may_alias(user):
            loosen_views(user)


def _changes(node: Node, other: Any) -> Iterator[tuple[Node, Any]]:
    """The nodes that changed strides reach, with their new values; None if bits may depend."""
    if _same_strides(value(node), other):
        return
    changed, seen, waiting = {node: other}, {node}, list(node.users)
    heapq.heapify(waiting)  # by their place in the graph: each comes after all that it reads
    while waiting:
        user = heapq.heappop(waiting)
        reads_sizes = has(user, Trait.METADATA) and not isinstance(value(user), Tensor)
        if user in seen or user.op == "output" or reads_sizes:
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
    """Whether the bits of an op's result do not depend on the layout of its changed inputs."""
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


def _is_complex(node: Node) -> bool:
    """Whether an op computes with complex numbers, whose products are sums."""
    dtypes = [dtype_of(source) for source in (node, *node.all_input_nodes)]
    return any(dtype is not None and dtype.is_complex for dtype in dtypes)


def _without_guards(node: Node) -> AbstractContextManager[None]:
    """Within the block, sizes evaluate to those of the trace, without recording guards."""
    for source in node.all_input_nodes:
        fake = value(source)
        if isinstance(fake, FakeTensor) and fake.fake_mode.shape_env is not None:
            guards: AbstractContextManager[None] = fake.fake_mode.shape_env.suppress_guards()
            return guards
    return nullcontext()


def _same_strides(left: Any, right: Any) -> bool:
    """Whether two values have equal strides for every allowed input, decided without a guard."""
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(_same_strides, left, right))
    if isinstance(left, Tensor):
        return same_shape(left.stride(), right.stride())
    return same_size(left, right)
