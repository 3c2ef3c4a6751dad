"""Which values of a program must fit into the range of a low-precision dtype."""

from collections.abc import Iterator, Mapping, Set

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.analyses.residual_stream import residual_sums
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.match import is_float_cast
from enginecast.passes.ir.source import module_path
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.precision.dtype_classes import Class, classify

LOW = frozenset({Class.STREAM, Class.RAISED})


def low_values(program: ExportedProgram, kept: Set[Node]) -> list[Node]:
    """The values that are in the compute dtype, or are cast to it, where they matter: that
    leave a module, go into a weighted sum or come out of one, or are sums of the residual stream.

    Others that stay inside a module are left out: the cube in a GELU is larger than fp16 holds and
    harms nothing.  So are masks and what they are added to: their fill values are clamped.

    Args:
        program: as captured; not altered.
        kept: nodes that compute in fp32 whatever they are, as `UnifyDtype.kept` finds them.
    """
    classes = classify(program, frozenset(kept))
    masked = _masked(program, classes)
    sums = residual_sums(program)
    values = []
    for node in all_nodes(program):
        if node.op != "call_function" or node in masked or is_float_cast(node):
            continue
        kind, path = classes.get(node), module_path(node)
        readers = list(_readers(node))
        is_low = kind in LOW or (
            kind is Class.PRECISE
            and any(user.op == "output" or classes.get(user) in LOW for user in readers)
        )
        matters = has(node, Trait.HEAVY) or any(
            user.op == "output" or has(user, Trait.HEAVY) or module_path(user) != path
            for user in readers
        )
        if is_low and (node in sums or matters):
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
