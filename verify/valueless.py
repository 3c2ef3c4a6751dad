"""Outputs that no value reaches: `torch.zeros(x.shape[0])` is zero whatever the inputs are.

A reference that is all zero otherwise proves nothing, for a broken engine may give zeros as well.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Node


def valueless_outputs(program: ExportedProgram, names: Sequence[str]) -> frozenset[str]:
    """The outputs that depend on sizes and on nothing else.

    Args:
        program: as captured.
        names: of its tensor outputs, in order.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    specs = [spec for spec in program.graph_signature.output_specs if _is_output(spec.kind)]
    made = [nodes[spec.arg.name] for spec in specs if isinstance(spec.arg, TensorArgument)]
    return frozenset(
        name for name, node in zip(names, made, strict=True) if not _reaches_values(node)
    )


def _is_output(kind: OutputKind) -> bool:
    return kind == OutputKind.USER_OUTPUT


def _reaches_values(node: Node) -> bool:
    """Whether a tensor that was not made here leads to a node; a number is not followed."""
    waiting, seen = [node], set()
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        if found.op != "call_function":
            return True
        waiting += [s for s in found.all_input_nodes if isinstance(s.meta.get("val"), Tensor)]
        if any(source.op == "get_attr" for source in found.all_input_nodes):
            return True  # a graph within the graph
    return False
