"""The cost of one run of a program: multiplications, and elements live at once.

Elements of the inputs times parameters say little of a convolution, whose weights are used at every
place, or of a decoder, which makes many places of one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.fx import Interpreter, Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from enginecast.passes.ir.edit import weight_specs, weight_tensor


@dataclass(frozen=True)
class Work:
    """The work of one run."""

    products: int
    elements: int
    """Most elements alive at once, without weights; a view counts with its own size."""


def work_of(program: ExportedProgram, inputs: Mapping[str, Tensor]) -> Work | None:
    """The work of a run on inputs of these shapes; None if values decide what is run.

    Nothing is computed, and only the shapes and dtypes of `inputs` count.
    """
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), FakeTensorMode():
        run = _Shapes(program, inputs)
        try:
            with counter:
                run.run()
        except Exception:  # an op that reads a value raises any kind
            return None
    return Work(counter.get_total_flops() // 2, run.most)


class _Shapes(Interpreter):
    """A run on tensors without data, within a mode that makes no others."""

    def __init__(self, program: ExportedProgram, inputs: Mapping[str, Tensor]) -> None:
        super().__init__(program.graph_module)
        weights = weight_specs(program)
        given = {name: weight_tensor(program, spec) for name, spec in weights.items()}
        self._shapes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in {**inputs, **given}.items()
        }
        self._weights = weights.keys()
        self._constants = {
            spec.arg.name: spec.arg.value
            for spec in program.graph_signature.input_specs
            if isinstance(spec.arg, ConstantArgument)
        }
        self.most = 0

    def run_node(self, n: Node) -> Any:
        if n.op == "placeholder":
            return self._shapes[n.name] if n.name in self._shapes else self._constants[n.name]
        result = super().run_node(n)
        held = (value for node, value in self.env.items() if node.name not in self._weights)
        leaves = {id(each): each for each in tree_leaves([*held, result])}
        tensors = (each for each in leaves.values() if isinstance(each, Tensor))
        self.most = max(self.most, sum(tensor.numel() for tensor in tensors))
        return result
