"""Take assertions out of a program: an engine computes, and has nowhere to fail.

Verification has run them on every case before.  What is lost is said: a later input that breaks one
gets a result all the same.
"""

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.graph_edit import aten, erase_dead
from enginecast.passes.purity import ASSERTS, CHECKS
from enginecast.passes.source import source_line
from enginecast.passes.structure import all_modules, all_nodes


def drop_assertions(program: ExportedProgram) -> tuple[str, ...]:
    """Erase every assertion, blocks included, in place.

    Returns:
        A sentence for each that a user should know of: not for dtypes, and not for the bounds that
        torch itself derives for a size that an op such as nonzero decides.
    """
    notes: dict[str, None] = {}
    for node in list(all_nodes(program)):
        if node.target not in CHECKS or node.target in ASSERTS:
            continue
        if not _is_derived(node):
            place = source_line(node) or node.name
            notes[f"the assertion at {place}{_message(node)} is not in the engine"] = None
        node.graph.erase_node(node)
    for module in all_modules(program):
        erase_dead(module.graph)
        module.recompile()
    return tuple(notes)


def _message(node: Node) -> str:
    said = [argument for argument in node.args if isinstance(argument, str)]
    text = said[0].removeprefix("Runtime assertion failed for expression ") if said else ""
    return f" ({text.partition(' on node ')[0]})" if text else ""


def _is_derived(node: Node) -> bool:
    """Whether a check is of sizes alone: nothing that the input's values decide directly."""
    if node.target not in (aten._assert_scalar.default, aten.sym_constrain_range.default):
        return node.target is not aten._assert_async.msg and (
            node.target is not aten._assert_async.default
        )
    waiting, seen = list(node.all_input_nodes), set()
    while waiting:
        found = waiting.pop()
        if found in seen or found.target is aten.sym_size.int:
            continue
        seen.add(found)
        if found.target in (aten.item.default, aten._local_scalar_dense.default):
            return False
        waiting += found.all_input_nodes
    return True
