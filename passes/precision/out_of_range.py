"""Keep in fp32 what fp16 does not hold at the scale that its readers take.

    %x = linear(%n, %w)          reaches 2e5, scaled by 2^-3: fp16
    %t = %x * 8                  as gelu needs it: fp32
    %g = gelu(%t)                reads what fp16 does not hold: fp32
    %s = sum(%g)                 reads it, too, and fits again: fp32, and cast for what comes next

So such a value stays in fp32, and what reads it, up to where values fit again.  So do inputs, which
engines take in fp32.  A pass that knows how large values get marks them; `unify-dtype` to fp16
obeys.  It also keeps a divisor's epsilon.
"""

from collections.abc import Iterator, Mapping

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import aten, is_float
from enginecast.passes.ir.match import is_call, real_users
from enginecast.passes.precision.low_values import low_values

KEPT = "enginecast_in_fp32"
FILL = 1e37
"""From here on, a number says "not here"."""
VANISHES = 2.0**-25
"""The largest number that fp16 rounds to zero."""
BEYOND, READS = "beyond fp16", "reads such a value"


def keep_in_fp32(
    program: ExportedProgram, sizes: Mapping[Node, float], limit: float
) -> Iterator[Node]:
    """Mark what stays in fp32; gives the values where that begins, in graph order.

    Args:
        sizes: the largest magnitude of values, as far as it is known.
        limit: the largest magnitude that may be fp16.
    """
    for start in low_values(program, set(), sizes, limit):
        size = sizes.get(start, 0.0)
        if size <= limit or is_marked(start) or not real_users(start):
            continue
        if start.op == "placeholder" and size >= FILL:  # a mask, which may as well be infinite
            continue
        yield start
        beyond = [start]
        while beyond:
            node = beyond.pop()
            node.meta[KEPT] = BEYOND
            for user in real_users(node):
                if user.op == "output" or not is_float(user) or is_marked(user):
                    continue
                user.meta[KEPT] = READS
                if sizes.get(user, 0.0) > limit:
                    beyond.append(user)


def kept_in_fp32(program: ExportedProgram) -> set[Node]:
    """The values that are marked, and sums with a number that fp16 takes for zero, with what reads
    them: they are divided by."""
    kept = set(filter(is_marked, all_nodes(program)))
    for node in all_nodes(program):
        if is_call(node, aten.add.Tensor) and is_float(node):
            added = node.args[1]
            if isinstance(added, float) and 0.0 < abs(added) <= VANISHES:
                kept.update((node, *filter(is_float, real_users(node))))
    return kept


def is_marked(node: Node) -> bool:
    """Whether a pass has marked a value to stay in fp32."""
    return KEPT in node.meta


def is_beyond(node: Node) -> bool:
    """Whether fp16 does not hold a value, not even as an output."""
    return node.meta.get(KEPT) == BEYOND
