"""Match a chain of ops, and say why it did not match.

A matcher is straight code over these functions: each either returns the node it was asked for or
raises `NoMatch` with a sentence about a node.  The pass turns that sentence into the reason of the
site it leaves alone.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from torch.fx import Node

from enginecast.passes.graph_edit import arguments, aten, is_float, value

CASTS = frozenset(
    {
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.to.other,
        aten._to_copy.default,
        aten.type_as.default,
    }
)
INERT = frozenset({aten.dropout.default, aten.detach.default, aten.alias.default})


class NoMatch(Exception):  # noqa: N818 - control flow between a matcher and its pass, never an error a user meets
    """A pattern stopped at a node, for a reason that a user can read."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


def op_name(node: Node) -> str:
    """How a reader would call the op: `mul.Tensor`, `placeholder`."""
    if node.op != "call_function":
        return node.op
    return str(node.target).removeprefix("aten.")


def is_call(node: object, *targets: Callable[..., Any]) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_float_cast(node: object) -> bool:
    """A cast from a float to a float, or a `to` that changes nothing."""
    return is_call(node, *CASTS) and is_float(node) and is_float(node.args[0])


def behind_casts(node: Node) -> Node:
    """The value before any float casts and inert nodes."""
    while is_float_cast(node) or is_call(node, *INERT):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def operands(node: Node) -> Iterator[tuple[Any, Any]]:
    """Both orders of a commutative binary op's arguments."""
    left, right = node.args[:2]
    yield left, right
    yield right, left


def scalar_operand(node: Node, target: Callable[..., Any]) -> tuple[Node, float] | None:
    """Split `op(x, 3.0)`, `op(3.0, x)` or `op(x, tensor_constant)` into x and the number; None when
    there is none.
    """
    if not is_call(node, target) or len(node.args) < 2 or node.kwargs:  # add has a factor alpha
        return None
    for left, right in operands(node):
        if isinstance(left, Node) and isinstance(right, int | float):
            return left, float(right)
    return None


def scalar_of(node: Node, target: Callable[..., Any], expected: float, *, where: str) -> Node:
    """The tensor operand of `op(x, expected)`, to a relative 1e-4 (sources spell constants with few
    digits).
    """
    found = scalar_operand(node, target)
    if found is None:
        raise NoMatch(
            node, f"{op_name(node)} {where}, expected {target} with the number {expected:g}"
        )
    source, number = found
    if abs(number - expected) > 1e-4 * abs(expected):
        raise NoMatch(node, f"{op_name(node)} {where} has {number:g}, expected {expected:g}")
    return source


def single_user(node: Node, *, where: str) -> Node:
    """The one node that uses this one, metadata asserts aside; NoMatch when there are more."""
    users = real_users(node)
    if len(users) != 1:
        names = ", ".join(u.name for u in users[:3])
        raise NoMatch(node, f"{op_name(node)} {where} has {len(users)} users ({names})")
    return users[0]


def real_users(node: Node) -> list[Node]:
    return [u for u in node.users if u.target is not aten._assert_tensor_metadata.default]


def last_dim(node: Node) -> Any:
    return value(node).shape[-1]


def reduces_last_dim(node: Node) -> bool:
    """Whether a `mean.dim`-like node reduces exactly the last dim and keeps it."""
    source, dims, *rest = arguments(node)
    keep = rest[0] if rest else node.kwargs.get("keepdim", False)
    return bool(keep) and list(dims) in ([-1], [value(source).dim() - 1])
