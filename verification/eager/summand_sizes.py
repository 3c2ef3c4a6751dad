"""How large the numbers are that an output is the sum of.

A mean over numbers that cancel is small beside them, and its error follows from them: relative to
the mean it may have any size in a correct engine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from enginecast.library_names import aten
from enginecast.passes.ir.interpret import Run, named
from enginecast.passes.ir.traits import Trait, has

_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar})
_FOLLOWED = _SUMS | {aten.mul.Tensor, aten.div.Tensor, aten.neg.default}
_ADDING = frozenset(
    {
        *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
        *(aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default),
        *(aten.addmm.default, aten.baddbmm.default, aten.dot.default, aten.mv.default),
        *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.einsum.default),
    }
)


def output_terms(
    program: ExportedProgram, inputs: Sequence[Mapping[str, Tensor]], names: Sequence[str]
) -> list[dict[str, float]]:
    """For each case, the L2 norm of each output of floats with magnitudes in place of the terms of
    its last sums.
    """
    run = _Terms(program, inputs)
    with torch.no_grad():
        results = run.results()
    specs = program.graph_signature.output_specs
    by_name = {node.name: node for node in program.graph.nodes}
    nodes = [by_name.get(spec.arg.name) for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    found = []
    for terms, given in zip(run.terms, results, strict=True):
        sizes = [terms.get(node, one) for node, one in zip(nodes, given, strict=True)]  # type: ignore[arg-type]
        tensors = named(sizes, names)
        found.append(
            {n: float(t.double().norm()) for n, t in tensors.items() if t.is_floating_point()}
        )
    return found


class _Terms(Run):
    """A run that keeps the magnitude of each value between the last sums and the outputs."""

    def __init__(self, program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(program, cases)
        self.terms: list[dict[Node, Tensor]] = [{} for _ in cases]
        (output,) = (node for node in program.graph.nodes if node.op == "output")
        # The nodes between the outputs and the last sums, these included.
        waiting, found = list(output.all_input_nodes), set[Node]()
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += node.all_input_nodes if _is_followed(node) else []
        self._followed = found

    def evaluate(self, node: Node, case: int) -> Any:
        found = super().evaluate(node, case)
        if node in self._followed and isinstance(found, Tensor) and found.is_floating_point():
            self.terms[case][node] = self._magnitude(node, found, self.terms[case])
        return found

    def _magnitude(self, node: Node, found: Tensor, terms: Mapping[Node, Tensor]) -> Tensor:
        if not _is_followed(node) and node.target not in _ADDING:
            return found.abs()
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        sizes = pytree.tree_map(_size, args)
        if _is_followed(node):
            pairs = zip(node.args, sizes, strict=True)
            sizes = [terms.get(a, size) if isinstance(a, Node) else size for a, size in pairs]
        if node.target in _SUMS:
            return torch.add(sizes[0], sizes[1], alpha=abs(kwargs.get("alpha", 1)))
        assert callable(node.target)
        size: Tensor = node.target(*sizes, **kwargs)
        return size.abs()


def _size(value: Any) -> Any:
    is_float = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
    return abs(value) if is_float else value


def _is_followed(node: Node) -> bool:
    return node.target in _FOLLOWED or has(node, Trait.MOVES)
