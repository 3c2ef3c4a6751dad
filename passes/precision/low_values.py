"""Which values of a program must fit into the range of a low-precision dtype."""

from collections.abc import Iterator, Mapping, Set

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import aten
from enginecast.passes.ir.match import is_float_cast
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.precision.dtype_classes import Class, classify

BOUNDED = frozenset({aten.tanh.default, aten.sigmoid.default, aten.erf.default})
"""Functions that give a right number for an infinite one."""
LOW = frozenset({Class.STREAM, Class.RAISED})


def low_values(program: ExportedProgram, kept: Set[Node]) -> list[Node]:
    """The values that are in the compute dtype, or are cast to it, as inputs are, and must fit into
    its range.

    What only bounded functions read is left out, and so is what follows from it up to there: the
    cube in a GELU is larger than fp16 holds, and the tanh of infinity is 1.  So are masks and what
    they are added to: their fill values are clamped.

    Args:
        program: as captured; not altered.
        kept: nodes that compute in fp32 whatever they are, as `UnifyDtype.kept` finds them.
    """
    classes = classify(program, frozenset(kept))
    masked = _masked(program, classes)
    values, harmless = [], set[Node]()
    for node in reversed(list(all_nodes(program))):
        users = list(_readers(node))
        passes_on = node.target in BOUNDED or has(node, Trait.ARITHMETIC)
        if passes_on and users and all(u.target in BOUNDED or u in harmless for u in users):
            harmless.add(node)
    for node in all_nodes(program):
        kind = classes.get(node)
        if node.op == "placeholder" and kind is Class.INPUT and node not in harmless:
            values.append(node)
        if node.op != "call_function" or node in masked or is_float_cast(node):
            continue
        is_low = kind in LOW or (
            kind is Class.PRECISE
            and any(user.op == "output" or classes.get(user) in LOW for user in _readers(node))
        )
        if is_low and node not in harmless:
            values.append(node)
    return values


def _readers(node: Node) -> Iterator[Node]:
    """Who reads a value, through the casts of the source: they are dropped."""
    for user in node.users:
        if not is_float_cast(user):
            yield user
        elif user.args[0] is node:  # type_as reads the dtype of another
            yield from _readers(user)


def _masked(program: ExportedProgram, classes: Mapping[Node, Class]) -> set[Node]:
    """Values that were filled, or that something computed from integers alone was added to."""
    masked: set[Node] = set()
    for node in all_nodes(program):
        if node.op != "call_function" or node not in classes:
            continue
        sources = [s for s in node.all_input_nodes if s in classes]
        exact = any(classes[s] in (Class.EXACT, Class.ISLAND) for s in sources)
        passes_on = has(node, Trait.ARITHMETIC, Trait.MOVES) or is_float_cast(node)
        spreads = passes_on and (exact or any(source in masked for source in sources))
        if has(node, Trait.LITERAL) or spreads:
            masked.add(node)
    return masked
