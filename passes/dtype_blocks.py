"""Precision classes across the borders of blocks: every value has one there, whichever way runs.

Operands bring their class in.  A result is precise where every branch gives it so, else stream: an
ONNX If gives one dtype.  What a loop carries has one class in all iterations, that of its start and
of what its body gives, whichever is lower; the body is sorted again until that settles.
"""

from collections.abc import Callable, Mapping

from torch.fx import Graph, Node

from enginecast.passes.dtype_kinds import Class
from enginecast.passes.graph_edit import is_float
from enginecast.passes.structure import Block, blocks, carried, lasting_positions, operands

Sort = Callable[[Graph, Mapping[Node, Class]], dict[Node, Class]]
"""The classes in a graph, from those of its placeholders."""
_KEPT = frozenset({Class.PRECISE, Class.EXACT})
_AS_VALUE = {Class.ISLAND: Class.EXACT, Class.PRECISE: Class.PRECISE, Class.EXACT: Class.EXACT}


def block_classes(node: Node, classes: Mapping[Node, Class], sort: Sort) -> dict[Node, Class]:
    """The class of every float in the blocks of a node, their placeholders included.

    Args:
        node: cond, while_loop or scan.
        classes: of the graph that it stands in, its operands among them.
        sort: of one block.
    """
    given = _entering(node, classes)
    while True:
        found: dict[Node, Class] = {}
        for block in blocks(node):
            known = {p: given[i] for i, p in enumerate(block.placeholders) if i in given}
            found |= known
            found |= sort(block.module.graph, known)
        settled = given | _handed_on(node, given, found)
        if settled == given:
            return found
        given = settled


def result_classes(node: Node, classes: Mapping[Node, Class]) -> tuple[Class | None, ...]:
    """The class of each result of a structured node; None for what is no float.

    Args:
        classes: holds those of its blocks.
    """
    count = carried(node)
    ways = [b for b in blocks(node) if b.way != "condition"]
    state = [classes.get(placeholder) for placeholder in ways[0].placeholders[:count]]
    columns = zip(*(_returned(block, classes)[count:] for block in ways), strict=True)
    return (*state, *(_joined(column) for column in columns))


def _returned(block: Block, classes: Mapping[Node, Class]) -> list[Class | None]:
    return [classes.get(r) if isinstance(r, Node) else None for r in block.results]


def _entering(node: Node, classes: Mapping[Node, Class]) -> dict[int, Class]:
    """The class of each float operand within the blocks, by position."""
    lasting = lasting_positions(node)
    given: dict[int, Class] = {}
    for position, operand in enumerate(operands(node)):
        if not is_float(operand):
            continue
        kind = classes[operand]
        if position in lasting and kind in (Class.WEIGHT, Class.RAISED):
            given[position] = kind
        else:
            given[position] = _AS_VALUE.get(kind, Class.STREAM)
    return given


def _handed_on(
    node: Node, given: Mapping[int, Class], found: Mapping[Node, Class]
) -> dict[int, Class]:
    """What a loop carries: the class that holds its start and what an iteration gives."""
    body = blocks(node)[-1]
    result = {}
    for position, kind in enumerate(_returned(body, found)[: carried(node)]):
        both = _joined((given.get(position), kind))
        if both is not None:
            result[position] = both
    return result


def _joined(kinds: tuple[Class | None, ...]) -> Class | None:
    """The class of a value that may come from several places."""
    if None in kinds:
        return None
    found = {_AS_VALUE.get(kind, Class.STREAM) for kind in kinds if kind is not None}
    if len(found) == 1:
        return found.pop()
    return Class.PRECISE if found <= _KEPT else Class.STREAM
