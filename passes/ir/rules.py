"""Rewrite every node that has a rule: the shape of most lowering passes.

RULES: Rules[Rewrite] = Rules()

@RULES.rule(aten.linear.default)
def _linear_to_matmul(program, node): ...

def run(self, program, context):
    return apply_rules(program, context, RULES)
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from enginecast.passes.ir.base import PassContext, ProgramView, Site
from enginecast.passes.ir.sites import SiteLog

Rewrite = Callable[[ProgramView, Node], Node | None]
"""Adds nodes before the one that it gets; returns what stands for it, None: the node itself, which
was changed."""


def apply_rules(
    program: ProgramView,
    context: PassContext,
    rules: Mapping[Any, Rewrite],
    unfit: Mapping[Any, Callable[[Node], bool]] = MappingProxyType({}),
) -> list[Site]:
    """Apply the rules to all nodes that there are now, in place.

    Args:
        rules: by op.
        unfit: whether a call of an op is to be rewritten, where that depends on the call; one that
            is not is no site.
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
