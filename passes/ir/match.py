"""Predicates on single nodes, for matchers; `passes.ir.pattern` matches several nodes."""

from collections.abc import Callable
from typing import Any, TypeGuard

from torch.fx import Node

from enginecast.passes.ir.edit import arguments, aten, is_float, value
from enginecast.passes.ir.traits import Trait, has, is_identity


class NoMatch(Exception):  # noqa: N818 - control flow between a matcher and its pass, never an error a user meets
    """Raised if a pattern does not match at a node; the reason is meant for users."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


def op_name(node: Node) -> str:
    """The short name of a node's op: `mul.Tensor`, `placeholder`."""
    if node.op != "call_function":
        return node.op
    return str(node.target).removeprefix("aten.")


def is_call(node: object, *targets: Callable[..., Any]) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_float_cast(node: object) -> bool:
    """A cast from a float to a float, or a `to` that changes nothing."""
    return has(node, Trait.CASTS) and is_float(node) and is_float(node.args[0])


def is_inert(node: object) -> TypeGuard[Node]:
    """Whether a node returns its first argument, perhaps as a contiguous copy."""
    return has(node, Trait.ALIASES) and is_identity(node)


def behind_casts(node: Node) -> Node:
    """The value before any float casts and inert nodes."""
    while is_float_cast(node) or is_inert(node):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def scalar_operand(node: Node, target: Callable[..., Any]) -> tuple[Node, float] | None:
    """Split `op(x, 3.0)`, `op(3.0, x)` or `op(x, constant)` into x and the number, if any."""
    if not is_call(node, target) or len(node.args) < 2 or node.kwargs:  # add has a factor alpha
        return None
    for left, right in (node.args[:2], node.args[1::-1]):
        if isinstance(left, Node) and isinstance(right, int | float):
            return left, float(right)
    return None


def real_users(node: Node) -> list[Node]:
    return [u for u in node.users if u.target is not aten._assert_tensor_metadata.default]


def last_dim(node: Node) -> Any:
    return value(node).shape[-1]


def reduces_last_dim(node: Node) -> bool:
    """Whether a `mean.dim`-like node reduces exactly the last dim and keeps it."""
    source, dims, *rest = arguments(node)
    keep = rest[0] if rest else node.kwargs.get("keepdim", False)
    return bool(keep) and list(dims) in ([-1], [value(source).dim() - 1])
