"""Which values of a program must fit into the range of a low-precision dtype."""

import math
from collections.abc import Iterator, Mapping, Set

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.analyses.residual_stream import SUMS
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import aten, weight_expressions, weight_value
from enginecast.passes.ir.match import is_call, is_float_cast
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.precision.dtype_classes import Class, classify

BOUNDED = frozenset({aten.tanh.default, aten.sigmoid.default, aten.erf.default})
"""Functions that give a right number for an infinite one."""
LOW = frozenset({Class.STREAM, Class.RAISED})


def low_values(
    program: ExportedProgram, kept: Set[Node], sizes: Mapping[Node, float], limit: float
) -> list[Node]:
    """The values that are in the compute dtype, or are cast to it, as inputs are, and must fit into
    its range.

    What only bounded functions read is left out, and so is what follows from it up to there: the
    cube in a GELU is larger than fp16 holds, and the tanh of infinity is 1.  So are masks and what
    they are added to: their fill values are clamped.

    Args:
        program: as captured; not altered.
        kept: nodes that compute in fp32 whatever they are, as `UnifyDtype.kept` finds them.
        sizes: the largest magnitude of values, as far as it is known.
        limit: the largest magnitude that the dtype holds.
    """
    classes = classify(program, frozenset(kept))
    masked = _masked(program, classes, sizes, limit)
    roots: dict[Node, Node] = {}
    for node in all_nodes(program):
        roots[node] = _root(node, roots)
    values, harmless = [], set[Node]()
    for node in reversed(list(all_nodes(program))):
        users = list(_readers(node))
        bounded = all(user.target in BOUNDED or user in harmless for user in users)
        if users and bounded and _never_nan(node, roots, sizes, limit):
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


def _root(node: Node, roots: Mapping[Node, Node]) -> Node:
    """Of a power of one value, times a number, that value; else the node itself."""
    if not (is_call(node, aten.mul.Tensor, aten.pow.Tensor_Scalar) or is_float_cast(node)):
        return node
    found = {roots.get(source, source) for source in node.all_input_nodes}
    return found.pop() if len(found) == 1 else node


def _never_nan(
    node: Node, roots: Mapping[Node, Node], sizes: Mapping[Node, float], limit: float
) -> bool:
    """Whether an operand that became infinite cannot make the result NaN: it is never multiplied by
    zero, nor taken from another that became infinite.
    """
    if node.target in BOUNDED or roots[node] is not node:
        return True
    infinite = [one for one in node.all_input_nodes if sizes.get(one, 0.0) > limit]
    return is_call(node, *SUMS) and len(infinite) <= 1


def _readers(node: Node) -> Iterator[Node]:
    """Who reads a value, through the casts of the source: they are dropped."""
    for user in node.users:
        if not is_float_cast(user):
            yield user
        elif user.args[0] is node:  # type_as reads the dtype of another
            yield from _readers(user)


def _masked(
    program: ExportedProgram,
    classes: Mapping[Node, Class],
    sizes: Mapping[Node, float],
    limit: float,
) -> set[Node]:
    """Values that were filled with a number that the dtype does not hold, or that something that
    holds one, and is computed from integers and buffers alone, was added to."""
    weights = weight_expressions(program)

    def fills(node: Node) -> bool:
        if node not in weights:
            return sizes.get(node, math.inf) > limit
        found = weight_value(program, node)
        parts = (found,) if isinstance(found, Tensor) else found  # of a split, say
        finite = (part[part.isfinite()].abs() for part in parts)
        return any(bool(part.numel()) and float(part.max()) > limit for part in finite)

    masked: set[Node] = set()
    for node in all_nodes(program):
        if node.op != "call_function" or node not in classes:
            continue
        numbers = (each for each in node.args[1:] if isinstance(each, int | float))
        if has(node, Trait.LITERAL) and any(limit < abs(each) < math.inf for each in numbers):
            masked.add(node)
        elif has(node, Trait.ARITHMETIC, Trait.MOVES) or is_float_cast(node):
            for source in node.all_input_nodes:
                exact = classes.get(source) in (Class.EXACT, Class.ISLAND)
                if source in masked or (exact and fills(source)):
                    masked.add(node)
    return masked
