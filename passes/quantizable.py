"""The layers of a program that a plan may quantise: ops that read a weight of their own."""

from collections import Counter
from dataclasses import dataclass

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.graph_edit import aten, value, weight_expressions, weight_specs
from enginecast.passes.quantization_plan import Kind
from enginecast.passes.source import module_path, source_line

_KINDS: dict[object, tuple[Kind, int]] = {
    aten.linear.default: ("linear", 1),
    aten.embedding.default: ("embedding", 0),
    aten.conv1d.default: ("conv", 1),
    aten.conv2d.default: ("conv", 1),
    aten.conv3d.default: ("conv", 1),
}
"""Op -> what it is, and which argument is its weight."""


@dataclass(frozen=True)
class Layer:
    """One of them."""

    node: Node
    kind: Kind
    weight: Node
    """The weight expression that the op reads."""
    name: str
    """Of the parameter; of several that are merged, of the first one."""
    module: str
    source: str
    ordinal: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: [N, K], [rows, size] or [out, in, kernel...]."""
        found: Tensor = value(self.weight)
        return tuple(found.shape)

    @property
    def key(self) -> tuple[str, str, int]:
        """As in `QuantizationPlan.by_site`."""
        return (self.module, self.source, self.ordinal)


def find_layers(program: ExportedProgram) -> list[Layer]:
    """In graph order; those inside of blocks (cond, loops) are not among them."""
    weights = weight_expressions(program)
    specs = weight_specs(program)
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target not in _KINDS:
            continue
        kind, place = _KINDS[node.target]
        weight = node.args[place]
        if not isinstance(weight, Node) or weight not in weights or node in weights:
            continue
        leaf = _first_leaf(weight)
        module, source = module_path(node), source_line(node)
        ordinal = counts[module, source]
        counts[module, source] += 1
        name = str(specs[leaf.name].target)
        found.append(Layer(node, kind, weight, name, module, source, ordinal))
    return found


def _first_leaf(weight: Node) -> Node:
    while weight.op != "placeholder":
        weight = weight.all_input_nodes[0]
    return weight
