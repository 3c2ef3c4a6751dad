"""What the blocks of cond, while_loop and scan may return in ONNX: values of their own.

torch.onnx refuses a block that hands back what it was given, a view of it, or one value twice; a
pass that drops an inert dropout makes such blocks.
"""

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.graph_edit import aten, insert, value
from enginecast.passes.structure import Block
from enginecast.passes.written import may_alias


def copy_results(program: ExportedProgram, block: Block) -> None:
    """Put a copy in the place of every result that shares memory with an operand or another result.

    Args:
        program: a view of the block (`passes.block_view`).
    """
    output = program.graph.output_node()
    results = list(block.results)
    owners: set[Node] = set()
    for position, result in enumerate(results):
        if not isinstance(result, Node) or not hasattr(value(result), "shape"):
            continue
        origins = _origins(result)
        if any(origin.op == "placeholder" for origin in origins) or origins & owners:
            with program.graph.inserting_before(output):
                results[position] = insert(
                    program.graph, aten.clone.default, (result,), like=result
                )
        owners |= origins
    if isinstance(output.args[0], tuple | list):
        output.args = (tuple(results),)
    else:
        output.args = (results[0],)


def _origins(node: Node) -> set[Node]:
    """The nodes whose memory a value may lie in."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.op != "call_function" or not may_alias(current):
            found.add(current)
        else:
            waiting += current.all_input_nodes
    return found
