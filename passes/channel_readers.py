"""The linears that read one value, whatever shape they read it in, and what else does."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from enginecast.passes.graph_edit import aten, is_float, same_size, shape_of, value
from enginecast.passes.head_layout import COPIES, VIEWS
from enginecast.passes.match import INERT, NoMatch, is_call, is_float_cast, op_name, real_users

_ONE_DIM = frozenset({aten.select.int, aten.slice.Tensor, aten.unsqueeze.default})
_SWAPS = frozenset({aten.transpose.int, aten.permute.default})


@dataclass(frozen=True)
class Readers:
    """Who reads a value [..., channels]."""

    linears: tuple[Node, ...]
    members: tuple[Node, ...]
    """The same values in other shapes, channels last."""


def find_roots(program: ExportedProgram, weights: set[Node]) -> list[Node]:
    """Each value that linears with a stored weight read, as it was before it was reshaped."""
    found: dict[Node, None] = {}
    for node in program.graph.nodes:
        if is_call(node, aten.linear.default) and node.args[1] in weights and node not in weights:
            root = node.args[0]
            assert isinstance(root, Node)
            while _keeps_channels(root):
                source = root.args[0]
                assert isinstance(source, Node)
                root = source
            found[root] = None
    return sorted(found)


def find_readers(root: Node, weights: set[Node]) -> Readers:
    """Who reads a value.

    Raises:
        NoMatch: something other than linears does.
    """
    linears: list[Node] = []
    members: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        for user in _tensor_users(node):
            if is_call(user, aten.linear.default) and _reads_as_input(user, node, weights):
                linears.append(user)
            elif _keeps_channels(user) and user.args[0] is node:
                members.append(user)
                waiting.append(user)
            elif user.op == "output":
                raise NoMatch(node, "it is an output of the program, too")
            else:
                raise NoMatch(user, f"{op_name(user)} reads it, too")
    return Readers(tuple(sorted(linears)), tuple(sorted(members)))


def _tensor_users(node: Node) -> Iterator[Node]:
    """Users but those that ask for a size."""
    for user in real_users(node):
        if user.op == "output" or isinstance(value(user), Tensor | tuple | list):
            yield user


def _reads_as_input(linear: Node, node: Node, weights: set[Node]) -> bool:
    given = [a for a in tree_leaves(linear.args) if a is node]
    return linear.args[0] is node and len(given) == 1 and linear.args[1] in weights


def _keeps_channels(node: Node) -> bool:
    """Whether a node hands on its first argument with the last dim as it is."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    source = node.args[0]
    if not all(isinstance(value(n), Tensor) and is_float(n) for n in (node, source)):
        return False
    if not same_size(shape_of(node)[-1:], shape_of(source)[-1:]):
        return False
    if is_call(node, *INERT, *COPIES, *VIEWS, aten.expand.default) or is_float_cast(node):
        return True
    rank = len(shape_of(source))
    if is_call(node, *_SWAPS):
        return _leaves_last(node, rank)
    return is_call(node, *_ONE_DIM) and int(str(node.args[1])) % rank != rank - 1


def _leaves_last(node: Node, rank: int) -> bool:
    if is_call(node, aten.permute.default):
        order = node.args[1]
        assert isinstance(order, list | tuple)
        return int(str(order[-1])) % rank == rank - 1
    return all(int(str(dim)) % rank != rank - 1 for dim in node.args[1:3])
