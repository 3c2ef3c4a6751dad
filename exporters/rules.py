"""Rewrite every node that has a rule, in a program and in the graphs within its graph."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.block_view import opened
from enginecast.passes.graph_edit import tracked_outputs
from enginecast.passes.structure import blocks

Rules = Mapping[Any, Callable[[ExportedProgram, Node], None]]
"""Op -> what replaces a call of it, in place."""


def apply_rules(program: ExportedProgram, rules: Rules) -> None:
    """Apply the rules to all nodes that there are now, in place, within blocks too."""
    # What is replaced may be an output, and the signature names outputs.
    with tracked_outputs(program):
        for node in list(program.graph.nodes):
            rule = rules.get(node.target)
            if rule is not None:
                rule(program, node)
            for block in blocks(node):
                with opened(program, node, block) as inner:
                    apply_rules(inner, rules)
