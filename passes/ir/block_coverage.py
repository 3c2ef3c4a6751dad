"""Which blocks of a program its cases run: what no case runs was not verified."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from enginecast.passes.ir.blocks import Block, all_blocks
from enginecast.passes.ir.interpret import Run
from enginecast.passes.ir.source import module_path, source_line

Way = GraphModule
"""A block, known by its graph."""


def ways_taken(
    program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]
) -> list[frozenset[Way]]:
    """The blocks that each case runs.

    Args:
        cases: inputs by placeholder name.

    Raises:
        AssertionFailedError, VerificationError: the program does not take a case.
    """
    run = _Recorded(program, cases)
    with torch.no_grad():
        run.results()
    return [frozenset(taken) for taken in run.taken]


def ways(program: ExportedProgram) -> dict[Way, str]:
    """Every way that there is to take, in words: "model.py:26: cond never took the false way"."""
    found = {}
    for node, block in all_blocks(program):
        place = source_line(node) or module_path(node) or node.name
        if block.way in ("true", "false"):
            found[block.module] = f"{place}: cond never took the {block.way} way"
        elif block.way == "body":
            found[block.module] = f"{place}: the body of while_loop never ran"
    return found


class _Recorded(Run):
    def __init__(self, program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(program, cases)
        self.taken: list[set[Way]] = [set() for _ in cases]

    def run_block(self, block: Block, values: list[Any], case: int) -> list[Any]:
        self.taken[case].add(block.module)
        return super().run_block(block, values, case)
