"""Weights computed on demand: expressions that are stored next to a program.

The program's own state holds stand-ins for them, of the right shape and dtype and without data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from enginecast.passes.ir.base import ProgramView

DEFERRED_KEY = "enginecast_deferred_weights"
"""Where a program keeps them: in the `meta` of its graph module."""


@dataclass(frozen=True)
class Expression:
    """Nodes of a graph of their own that depend on weights alone."""

    nodes: tuple[Node, ...]
    """Each after what it reads; the last one is the result."""
    tensors: Mapping[Node, Tensor]
    """What the placeholders among the nodes stand for; their targets are the weights' names."""

    def __call__(self) -> Tensor:
        """The value, computed now; contiguous, on the CPU."""
        values = dict(self.tensors)
        with torch.no_grad():
            for node in self.nodes:
                if node.op == "placeholder":
                    continue
                assert callable(node.target)
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            return values[self.nodes[-1]].detach().contiguous()


@dataclass(frozen=True)
class LazyWeight:
    """A tensor of an engine: its name and type now, its value when it is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    compute: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class DeferredWeight(LazyWeight):
    """A weight of a program that is computed when somebody asks."""

    compute: Expression


def defer_weights(program: ProgramView, weights: Mapping[str, DeferredWeight]) -> None:
    """Leave weights on a program, by the target of their placeholder; copies carry them along."""
    program.graph_module.meta[DEFERRED_KEY] = {**_table(program), **weights}


def deferred_weight(program: ProgramView, target: str) -> DeferredWeight | None:
    """The weight behind a placeholder; None for one that the program's state holds."""
    return _table(program).get(target)


def deferred_weights(program: ProgramView) -> dict[str, DeferredWeight]:
    """Those that the program still has, by the target of their placeholder, in graph order."""
    table = _table(program)
    targets = (spec.target for spec in program.graph_signature.input_specs)
    return {target: table[target] for target in targets if target is not None and target in table}


def _table(program: ProgramView) -> Mapping[str, DeferredWeight]:
    found: Mapping[str, DeferredWeight] = program.graph_module.meta.get(DEFERRED_KEY, {})
    return found
