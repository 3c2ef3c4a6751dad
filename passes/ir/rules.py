"""Rewrite every node that a pass looks for, or that has a rule: most passes work this way.

RULES: Rules[Rewrite] = Rules()

@RULES.rule(aten.linear.default)
def _linear_to_matmul(program, node): ...

def run(self, program, context):
    return apply_rules(program, context, RULES)
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from enginecast.passes.ir.base import PassContext, ProgramView, Site
from enginecast.passes.ir.edit import dtype_of, erase_dead, take_place, value
from enginecast.passes.ir.match import NoMatch
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.traits import Trait, has

Rewrite = Callable[[ProgramView, Node], Node | None]
"""Adds nodes before the given one and returns its replacement; None: the node was changed in
place."""


def apply_rules(
    program: ProgramView,
    context: PassContext,
    rules: Mapping[Any, Rewrite],
    unfit: Mapping[Any, Callable[[Node], bool]] = MappingProxyType({}),
) -> list[Site]:
    """Apply the rules in place to all nodes that exist at the start.

    Args:
        unfit: whether a call needs rewriting, if that depends on the call; others are not sites.
    """
    log = SiteLog(context)
    for node in list(program.graph.nodes):
        rule = rules.get(node.target)
        if rule is None or (node.target in unfit and not unfit[node.target](node)):
            continue
        if log.skipped(node):
            continue
        with program.graph.inserting_before(node):
            result = rule(program, node)
        log.done(node)
        if result is not None:
            node.replace_all_uses_with(result)
            program.graph.erase_node(node)
    return log.sites


def rewrite_sites(
    program: ProgramView,
    context: PassContext,
    is_site: Callable[[Node], bool],
    rewrite: Callable[[Node], str],
) -> list[Site]:
    """Rewrite, in graph order, the sites among the nodes that exist at the start.

    Args:
        rewrite: puts other nodes in the place of a site, and gives a note on it.  `NoMatch` leaves
            the site alone, for its reason.
    """
    log = SiteLog(context)
    for node in list(program.graph.nodes):
        if not is_site(node) or log.skipped(node):
            continue
        try:
            log.done(node, rewrite(node))
        except NoMatch as miss:
            log.refused(node, miss.reason)
    erase_dead(program.graph)
    return log.sites


def insert_traced(program: ProgramView, node: Node, function: Callable[..., Any]) -> Any:
    """Add the torch ops that a function calls on a node's arguments, at the insertion point.

    Returns the function's result or results. Casts without effect are left out.
    """
    return insert_graph(program.graph, node, traced(node, function))


def traced(
    node: Node, function: Callable[..., Any], table: Mapping[Any, Any] | None = None
) -> Graph:
    """The torch ops that a function calls on a node's arguments, as a graph.

    Args:
        table: decompositions of composite ops; without it these stay.
    """
    sources = node.all_input_nodes

    def call(*values: Any) -> Any:
        given = dict(zip(sources, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return function(*args, **kwargs)

    # Without it, kernels in C++ read sizes as numbers, and fix those that vary.
    with enable_python_dispatcher():
        made = make_fx(call, decomposition_table=table, pre_dispatch=table is None)
        return made(*map(value, sources)).graph


def insert_graph(graph: Graph, node: Node, form: Graph) -> Any:
    """Add a graph that `traced` made for a node, or for one like it; see `insert_traced`."""
    known = dict(zip(form.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    for found in form.nodes:
        if found.op != "call_function":
            continue
        args, kwargs = torch.fx.map_arg((found.args, found.kwargs), known.__getitem__)
        if has(found, Trait.CASTS) and args[1:2] == (dtype_of(args[0]),):
            known[found] = args[0]
        else:
            made = graph.create_node("call_function", found.target, args, kwargs)
            take_place(made, node)
            made.meta["val"] = found.meta["val"]
            known[found] = made
    return torch.fx.map_arg(form.output_node().args[0], known.__getitem__)
