"""The state of one legalisation of quantised values, and the edits that its rules share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import LoweringError
from enginecast.exporters.hoist_weights import evaluate
from enginecast.exporters.readers import Reader
from enginecast.passes.graph_edit import aten, dtype_of, insert
from enginecast.passes.purity import is_pure
from enginecast.passes.source import module_path, source_line


@dataclass
class Rewriting:
    """One legalisation: it is handed to every rule."""

    program: ExportedProgram
    reader: Reader
    gemm_float8: bool
    weights: set[Node]
    made: dict[tuple[Any, ...], Node] = field(default_factory=dict)
    """What several nodes read in one form, by what it is made of."""

    def add(self, target: Callable[..., Any], *args: Any, like: Node) -> Node:
        """A call at the insertion point; a weight expression where all that it reads is one."""
        node = insert(self.program.graph, target, args, like=like)
        if is_pure(node) and self.weights.issuperset(node.all_input_nodes):
            self.weights.add(node)
        return node

    def once(self, target: Callable[..., Any], *args: Any, like: Node) -> Node:
        """The same call, made at its first reader; those come in graph order."""
        key = (target, *args)
        if key not in self.made:
            self.made[key] = self.add(target, *args, like=like)
        return self.made[key]

    def replace(self, node: Node, result: Node) -> None:
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)

    def cast(self, node: Node, dtype: torch.dtype, like: Node) -> Node:
        if dtype_of(node) == dtype:
            return node
        return self.add(aten.to.dtype, node, dtype, like=like)

    def scale(self, scale: Node, dtype: torch.dtype, like: Node) -> Node:
        """A constant scale in the dtype of what is scaled, where that dtype holds it to its last
        digit but one; else in fp32, or for TensorRT, which wants no other dtype, not at all.

        Raises:
            LoweringError: for TensorRT.
        """
        if dtype == torch.float32 or scale not in self.weights:
            return scale
        value = evaluate(self.program, scale)
        if self.reader == "tensorrt":
            _refuse_lost(value, dtype, like)
            return self.cast(scale, dtype, like)
        limits = torch.finfo(dtype)
        fits = bool(((value >= limits.tiny) & (value <= limits.max)).all())
        return self.cast(scale, dtype, like) if fits else scale


def _refuse_lost(scale: Tensor, dtype: torch.dtype, node: Node) -> None:
    """Whether a dtype holds a scale to its last digit but one; subnormal values may be exact."""
    held = scale.to(dtype).float()
    lost = ~(
        (held > 0) & held.isfinite() & ((held - scale).abs() <= scale * torch.finfo(dtype).eps)
    )
    if bool(lost.any()):
        place = f"module '{module_path(node)}', {source_line(node) or 'no source line'}"
        raise LoweringError(
            f"the scale {float(scale[lost][0]):.3g} of {node.target} ({place}) does not fit"
            f" {str(dtype).removeprefix('torch.')}, in which TensorRT holds it",
            hint="fp8-matmul{scale_dtype=fp16} makes scales that do; keep the layer otherwise.",
        )
