"""Capture a module, once for all tests of a file: passes run on copies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.passes.captured.functionalize import Functionalize
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import input_names
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.public import described, some


@dataclass(frozen=True, eq=False)
class Captured:
    """A module and its program."""

    module: nn.Module
    program: ExportedProgram
    """Functionalized, as every pass sees it; no pass alters it."""
    inputs: tuple[Tensor, ...]
    """Those that it was captured with."""

    def __repr__(self) -> str:
        """The module, how many nodes it has, and the inputs."""
        inputs, nodes = some(map(described, self.inputs)), len(self.program.graph.nodes)
        return f"Captured({type(self.module).__name__}: {inputs}; {nodes} nodes)"

    def named(self, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Inputs by the names that the program has for them."""
        return dict(zip(input_names(self.program), inputs, strict=True))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def capture(
    module: nn.Module | Callable[..., Any],
    *inputs: Tensor,
    dynamic: Mapping[int, Any] | Sequence[Mapping[int, Any]] | None = None,
) -> Captured:
    """Capture a module, or a function of tensors.

    Args:
        module: it is put into eval mode.
        inputs: an example of its arguments, in order.
        dynamic: the dimensions of every input that vary: {0: torch.export.Dim("batch", max=8)};
            or a sequence with those of each input.

    Examples:
        >>> import torch
        >>> from enginecast.testing import capture
        >>> capture(torch.nn.Linear(8, 2), torch.randn(3, 8))
        Captured(Linear: float32 [3, 8]; 5 nodes)
    """
    whole = module if isinstance(module, nn.Module) else Function(module)
    return Captured(whole, trace(whole, *inputs, dynamic=dynamic), inputs)


def trace(
    module: nn.Module,
    *inputs: Tensor,
    dynamic: Mapping[int, Any] | Sequence[Mapping[int, Any]] | None = None,
) -> ExportedProgram:
    """The program of a module alone, functionalized; see `capture`.

    Args:
        module: as `capture` takes it.
        inputs: as `capture` takes them.
        dynamic: as `capture` takes it.
    """
    each = [dynamic] * len(inputs) if isinstance(dynamic, Mapping) else dynamic
    shapes: Any = tuple(map(dict, each)) if each else None
    if shapes and isinstance(module, Function):
        shapes = (shapes,)  # its inputs are one variadic argument
    with torch.no_grad():
        program = torch.export.export(module.eval(), inputs, dynamic_shapes=shapes, strict=False)
    run_pipeline([Functionalize()], program, PassContext())
    return program
