"""Merge nodes that compute the same value, such as the transposes of a weight that two layers read.

    before:  %t = aten.t.default(%w)      after:  %t = aten.t.default(%w)
             %t_1 = aten.t.default(%w)

Promises `exact`.  Left alone is what some op still writes into, and what reads that.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Node

from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.effects import is_pure, is_random
from enginecast.passes.ir.sites import SiteLog


@dataclass(frozen=True)
class MergeEqual(GraphPass):
    """Compute equal values once."""

    name: ClassVar[str] = "merge-equal"
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        merge_equal(program, log)
        return log.sites


def merge_equal(program: ProgramView, log: SiteLog) -> None:
    """Replace each pure node by the first one with the same op and arguments."""
    first: dict[Any, Node] = {}
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not is_pure(node) or is_random(node):
            continue
        if _decides_sizes(node) or any(map(_decides_sizes, node.users)):
            continue  # torch gave each result a size of its own, and its tracer would see one
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        if key not in first:
            first[key] = node
        elif not log.skipped(node):
            log.done(node, f"same as {first[key].name}")
            node.replace_all_uses_with(first[key])
            program.graph.erase_node(node)


def _decides_sizes(node: Node) -> bool:
    """Whether what an op reads decides a size of its result: nonzero, a mask as an index, item."""
    return bool(node.meta.get("unbacked_bindings"))


def _frozen(argument: Any) -> Any:
    """A hashable form; numbers carry their type: 1, 1.0 and True are equal, and differ."""
    if isinstance(argument, list | tuple):
        return (type(argument).__name__, *map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in argument.items()))
    if isinstance(argument, Node):
        return argument
    return (type(argument).__name__, repr(argument))
