"""Take the weight expressions out of a program, to be computed one at a time while they are
written.

    before:  %wt = aten.t(aten.to.dtype(%p, f16))       after:  %w: f16[64, 128]  (no data)
             %y = aten.matmul(%x, %wt)                          %y = aten.matmul(%x, %w)
                                                                HoistedWeight("...q.weight",
                                                                expression of %p)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.passes.graph_edit import (
    add_weight,
    drop_unused_weights,
    erase_dead,
    shape_of,
    tracked_outputs,
    value,
    weight_expressions,
    weight_specs,
    weight_tensor,
)
from enginecast.passes.purity import ASSERTS
from enginecast.passes.structure import blocks

GROWTH = 4096
"""Elements that an expression may have beyond its weights: an expand of a table is cheaper to
compute than to store.
"""


@dataclass(frozen=True)
class HoistedWeight:
    """A tensor of the engine: its name and type now, its value when it is written."""

    name: str
    placeholder: str
    """Target of the placeholder that stands for it in the program."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    compute: Callable[[], Tensor]
    """Evaluates the expression; contiguous, on the CPU."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def hoist_weights(program: ExportedProgram) -> list[HoistedWeight]:
    """Replace every maximal weight expression by a placeholder without data, in place.

    Args:
        program: a structural copy; its graph and signature change.

    Returns:
        The weights in graph order, named after the parameters they come from.
    """
    _erase_asserts(program)
    stored = {node for node in weight_expressions(program) if _worth_storing(node)}
    roots = [
        node
        for node in program.graph.nodes
        if node in stored and any(user not in stored for user in node.users)
    ]
    # Names and values come from the graph as it is now.
    plans = [(root, _base_name(program, root), _plan(program, root)) for root in roots]
    hoisted: dict[str, HoistedWeight] = {}
    taken: set[str] = set()
    for index, (root, name, compute) in enumerate(plans):
        found = value(root)
        empty = nn.Parameter(_without_data(root), False)
        # A flat target: "a.weight" beside "a.weight.1" would be a parameter inside a parameter.
        target = f"hoisted_{index}"
        node = add_weight(program, target, empty, InputKind.PARAMETER)
        _replace(program, root, node, stored)
        hoisted[target] = HoistedWeight(name, target, found.dtype, tuple(found.shape), compute)
    erase_dead(program.graph)
    drop_unused_weights(program)
    # A weight that only an expression too large to store reads goes with that expression.
    left = [hoisted[str(spec.target)] for spec in weight_specs(program).values()]
    return [replace(weight, name=_unique(weight.name, taken)) for weight in left]


def _without_data(root: Node) -> Tensor:
    """A tensor of the shape and dtype of an expression, in the memory of one element (stride 0).

    What a loop begins with has to have the strides that its body gives, so that is laid out; it is
    small, as the value of a weight that a loop changes.
    """
    found = value(root)
    if any(blocks(user) for user in root.users):
        return torch.zeros(found.shape, dtype=found.dtype)
    return torch.zeros((), dtype=found.dtype).expand(found.shape)


def _replace(program: ExportedProgram, root: Node, node: Node, stored: set[Node]) -> None:
    # An expression may be an output, and the signature names outputs.
    with tracked_outputs(program):
        for user in list(root.users):
            if user not in stored:
                user.replace_input_with(root, node)


def _erase_asserts(program: ExportedProgram) -> None:
    """An assert about a weight would count as a reader of it, beside the expression."""
    for node in weight_expressions(program):
        for user in list(node.users):
            if user.target in ASSERTS:
                program.graph.erase_node(user)


def evaluate(program: ExportedProgram, expression: Node) -> Tensor:
    """The value of a weight expression, computed now."""
    return _plan(program, expression)()


def _worth_storing(node: Node) -> bool:
    if not isinstance(value(node), Tensor) or not all(isinstance(s, int) for s in shape_of(node)):
        return False
    elements: int = value(node).numel()
    stored: int = sum(value(leaf).numel() for leaf in _leaves(node))
    return elements <= GROWTH + stored


def _leaves(root: Node) -> list[Node]:
    """The weights that an expression reads, in the order of reading."""
    return [node for node in _in_order(root) if node.op == "placeholder"]


def _in_order(root: Node) -> list[Node]:
    """Everything that an expression consists of, each once, after what it reads."""
    order: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in order:
            return
        for source in node.all_input_nodes:
            visit(source)
        order[node] = None

    visit(root)
    return list(order)


def _plan(program: ExportedProgram, root: Node) -> Callable[[], Tensor]:
    """A closure over the expression and its mapped weights; the graph may change afterwards."""
    specs = weight_specs(program)
    order = _in_order(root)
    tensors = {n: weight_tensor(program, specs[n.name]) for n in order if n.op == "placeholder"}
    calls = [(n, n.target, n.args, n.kwargs) for n in order if n.op == "call_function"]

    def compute() -> Tensor:
        values: dict[Node, Tensor] = dict(tensors)
        with torch.no_grad():
            for node, target, args, kwargs in calls:
                assert callable(target)
                values[node] = target(
                    *torch.fx.map_arg(args, values.__getitem__),
                    **torch.fx.map_arg(kwargs, values.__getitem__),
                )
            return values[root].detach().contiguous()

    return compute


def _base_name(program: ExportedProgram, root: Node) -> str:
    specs = weight_specs(program)
    leaves = [specs[leaf.name] for leaf in _leaves(root)]
    own = [spec for spec in leaves if spec.kind is not InputKind.CONSTANT_TENSOR]
    names = [str(spec.target) for spec in own or leaves]  # a factor of a weight names nothing
    if len(names) == 1:
        return names[0]
    # q.weight, k.weight, v.weight of one module merge to attention.q+k+v.weight
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) == 1 and len({(*p[:-2], p[-1]) for p in parts}) == 1:
        joined = "+".join(p[-2] for p in parts)
        return ".".join([*parts[0][:-2], joined, parts[0][-1]])
    return names[0] + "+"


def _unique(name: str, taken: set[str]) -> str:
    """The name, or name.1, name.2 where one weight is stored in several forms."""
    candidate, count = name, 0
    while candidate in taken:
        count += 1
        candidate = f"{name}.{count}"
    taken.add(candidate)
    return candidate
