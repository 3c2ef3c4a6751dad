"""Which casts between float dtypes a program may have: only those marked with the classes they
join.

`unify-dtype` drops every cast of the source and marks each one that it puts in.  A cast without a
mark was put in by nobody who knew why: by a pass that mixed two dtypes up, or one that lost what it
replaced.  The targets take dtypes as they stand in the graph, so each would cost a conversion in
every run, and may be the place where digits get lost.
"""

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import dtype_of, first_input
from enginecast.passes.ir.match import is_float_cast
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.text import dtype_text

BORDER = "enginecast_border"
"""Key in a node's meta; the value says between which classes the cast stands."""


_OF_SOURCE = "the source computes in"


def mark_rounding(cast: Node, dtype: torch.dtype) -> None:
    """Say that a cast is there because the source computes in a dtype, and rounds to it."""
    mark_border(cast, f"{_OF_SOURCE} {dtype_text(dtype)}")


def is_rounding(node: Node) -> bool:
    """Whether a node is one of the two casts that round as the source does, there and back."""
    return border_of(node).startswith(_OF_SOURCE)


def rounds_as_source(program: ExportedProgram) -> bool:
    """Whether some values are rounded because the source computes them in 16 bits."""
    return any(map(is_rounding, all_nodes(program)))


def mark_border(cast: Node, text: str) -> None:
    """Say why a cast between float dtypes is there."""
    cast.meta[BORDER] = text


def border_of(cast: Node) -> str:
    """Why a cast is there; empty when nobody said."""
    return str(cast.meta.get(BORDER, ""))


def unexplained_casts(program: ExportedProgram) -> list[Node]:
    """Casts from one float dtype to another that have no mark, in graph order."""
    return [
        node
        for node in all_nodes(program)
        if is_float_cast(node)
        and dtype_of(node) != dtype_of(first_input(node))
        and not border_of(node)
    ]


def check_casts(program: ExportedProgram) -> None:
    """Check what a program is left with after its dtypes were decided.

    Raises:
        PassError: lists every cast without a border: node, module, line, from and to.
    """
    found = unexplained_casts(program)
    if not found:
        return
    lines = []
    for cast in found:
        source = first_input(cast)
        place = f"{module_path(cast)} {source_line(cast)}".strip() or "no place in the source"
        dtypes = f"{dtype_text(dtype_of(source))} -> {dtype_text(dtype_of(cast))}"
        lines.append(f"  {cast.name} casts {source.name} {dtypes} ({place})")
    raise PassError(
        f"{len(found)} unexpected casts between float dtypes are left:\n" + "\n".join(lines),
        hint="A pass that has to cast says why: cast_borders.mark_border(node, text).",
    )
