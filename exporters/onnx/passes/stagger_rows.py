"""Keep the rows that a product reads from lying a multiple of 4096 bytes apart.

    before:  %y = aten.linear(%x, %w, %b)       after:  %p = aten.constant_pad_nd(%x, [0, 16])
             (%x of 2048 columns, fp32)                 %v = aten.constant_pad_nd(%w, [0, 16])
                                                        %y = aten.linear(%p, %v, %b)

A product on a CPU reads the same columns of many rows at a time, 12 with AVX-512.  In an L1 cache
addresses 4096 bytes apart have one set, of 8 or 12 lines, for themselves, so that such rows drive
one another out.  ONNX Runtime's products, and OpenVINO's, take up to 1.4 times as long then; the
columns of zeros cost one copy, which all linears that read the value share once equal values are
merged.

Must not happen: where there are few rows, so that the copy costs more than it saves; on a GPU.

Promises `reordered`: only zeros are added, but a kernel may divide longer rows into other parts.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from enginecast.exporters.onnx.ops.graph import captured_rows
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import (
    aten,
    dtype_of,
    first_input,
    shape_of,
    take_place,
    value,
    weight_expressions,
)
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.sites import SiteLog

SET_BYTES = 4096
"""How far apart two addresses are that have to share a set of lines: 64 sets of 64 bytes."""
COLUMNS = 16
"""Of zeros, fp32: one line of the cache, so that each row begins in the next set."""
FEWEST_ROWS = 16
"""With which the columns were measured to pay."""


@dataclass(frozen=True)
class StaggerRows(GraphPass):
    """Add columns of zeros to a linear's input if its rows would share cache lines."""

    name: ClassVar[str] = "stagger-rows"
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        weights = weight_expressions(program)
        for node in list(program.graph.nodes):
            if not is_call(node, aten.linear.default) or not _collides(node) or log.skipped(node):
                continue
            if node.args[1] not in weights:
                log.refused(node, "its weight is computed from inputs")
            elif (rows := captured_rows(first_input(node))) is None:
                log.refused(node, "values decide how many rows it has")
            elif rows < FEWEST_ROWS:
                log.refused(node, f"{rows} rows, and the columns pay from {FEWEST_ROWS} on")
            else:
                _widen(program, node)
                log.done(node)
        return log.sites


def _collides(node: Node) -> bool:
    """Whether rows of the input lie a multiple of `SET_BYTES` apart."""
    size = shape_of(first_input(node))[-1]
    return dtype_of(node) == torch.float32 and isinstance(size, int) and not size * 4 % SET_BYTES


def _widen(program: ProgramView, node: Node) -> None:
    with program.graph.inserting_before(node):
        for place in (0, 1):
            source = node.args[place]
            assert isinstance(source, Node)
            node.update_arg(place, _padded(program, source, node))


def _padded(program: ProgramView, source: Node, like: Node) -> Node:
    """Its fake value is made here: torch's kernel would fix sizes that vary (2.13)."""
    op = aten.constant_pad_nd.default
    wide = program.graph.create_node("call_function", op, (source, [0, COLUMNS]))
    take_place(wide, like)
    *rows, size = shape_of(source)
    wide.meta["val"] = value(source).new_empty((*rows, size + COLUMNS))
    return wide
