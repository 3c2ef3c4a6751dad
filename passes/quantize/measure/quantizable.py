"""The layers of a program that a plan may quantize: ops that read a weight of their own."""

from collections import Counter
from dataclasses import dataclass

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.edit import (
    arguments,
    aten,
    insert,
    shape_of,
    value,
    weight_expressions,
    weight_specs,
)
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.quantization_plan import Kind
from enginecast.passes.ir.source import module_path, source_line

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


_PRODUCTS = (aten.mm.default, aten.matmul.default)


def products_as_linears(program: ExportedProgram) -> int:
    """Make linears of products x @ W and b + x @ W whose W is a weight [K, N], in place.

    Returns:
        How many there were.
    """
    weights = weight_expressions(program)
    count = 0
    for node in list(program.graph.nodes):
        found = None if node in weights else _factors(node, weights)
        if found is None:
            continue
        x, weight, *bias = found
        with program.graph.inserting_before(node):
            transposed = insert(program.graph, aten.t.default, (weight,), like=node)
        node.target, node.args = aten.linear.default, (x, transposed, *bias)
        count += 1
    return count


def _factors(node: Node, weights: set[Node]) -> tuple[Node, ...] | None:
    """x, W and b, if there is one, of a product that is a linear; None for any other node."""
    if node.kwargs:  # factors alpha and beta
        return None
    if is_call(node, aten.addmm.default):
        bias, x, weight = arguments(node)
        fits = bias in weights and shape_of(bias) == shape_of(weight)[1:]
        found = (x, weight, bias)
    elif is_call(node, *_PRODUCTS):
        x, weight = found = arguments(node)
        fits = len(shape_of(x)) > 1
    else:
        return None
    fits = fits and weight in weights and x not in weights and len(shape_of(weight)) == 2
    return found if fits else None
