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
"""Key of the deferred weights in the `meta` of a program's graph module."""


@dataclass(frozen=True)
class Expression:
    """A separate graph's nodes that depend on weights alone."""

    nodes: tuple[Node, ...]
    """In topological order; the last one is the result."""
    tensors: Mapping[Node, Tensor]
    """The tensor of each placeholder; the placeholders' targets are the weights' names."""

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
    """A tensor of an engine whose value is computed when it is written."""

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
    """A weight of a program that is computed on demand."""

    compute: Expression


def defer_weights(program: ProgramView, weights: Mapping[str, DeferredWeight]) -> None:
    """Attach deferred weights to a program, by placeholder target; structural copies keep them."""
    program.graph_module.meta[DEFERRED_KEY] = {**_table(program), **weights}


def deferred_weight(program: ProgramView, target: str) -> DeferredWeight | None:
    """The deferred weight of a placeholder; None if the program's state holds the weight."""
    return _table(program).get(target)


def deferred_weights(program: ProgramView) -> dict[str, DeferredWeight]:
    """The deferred weights that the program still uses, by placeholder target, in graph order."""
    table = _table(program)
    targets = (spec.target for spec in program.graph_signature.input_specs)
    return {target: table[target] for target in targets if target is not None and target in table}


def _table(program: ProgramView) -> Mapping[str, DeferredWeight]:
    found: Mapping[str, DeferredWeight] = program.graph_module.meta.get(DEFERRED_KEY, {})
    return found
