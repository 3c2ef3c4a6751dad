"""Quantized operators in torch's own: `torch._scaled_mm` and what rounds for it.

    enginecast.quantize(%x, %s, fp8)     %w = aten.to.dtype(%x, f32)
                                         %d = aten.div.Tensor(%w, %s)
                                         %c = aten.clamp.default(%d, -448, 448)
                                         %q = aten.to.dtype(%c, fp8)

Promises `reordered`: every step is the one that our op is defined by, but a product may add up in
another order, and a bias may be rounded to the dtype of the result before it is added.

The clamp is what keeps a value beyond the range finite: torch 2.12 and older cast it to NaN.  For
the same reason nothing may come between the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import LoweringError
from enginecast.ops.quantize import LIMITS, SMALLEST_SCALE
from enginecast.ops.rules import Rules
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    erase_dead,
    insert,
    shape_of,
)
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.rules import Rewrite, apply_rules
from enginecast.passes.ir.source import module_path

_LEAST_ROWS = 16
"""CUDA's integer product takes more rows than that."""
_MULTIPLE = 8
"""And K and N that are multiples of this one."""

FORMS: Rules[Callable[..., Node]] = Rules()
"""Op -> its plain form: takes a `_Plain`, the node before which it is made, and its arguments."""


@dataclass(frozen=True)
class DecomposeQuantized(Pass):
    """Replace our quantized ops by aten ones.  A weight stays quantized only where it was hoisted:
    as plain ops, what brings it back to floats is a weight expression like any other.

    Raises:
        LoweringError: an integer product of a size that CUDA does not take.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """The integer product has rules on the latter."""

    name: ClassVar[str] = "decompose-quantized"
    after: ClassVar[frozenset[str]] = frozenset({"hoist-weights"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        plain = _Plain(program, self.device)
        sites = apply_rules(program, context, {op: plain.rewrite(op) for op in FORMS})
        erase_dead(program.graph)
        return sites


class _Plain:
    """Each method makes the plain form of one op before the node that calls it."""

    def __init__(self, program: ExportedProgram, device: str) -> None:
        self._graph = program.graph
        self._device = device

    def rewrite(self, op: Any) -> Rewrite:
        """What makes the plain form of an op."""
        return lambda _, node: FORMS[op](self, node, *arguments(node))

    def _call(self, at: Node, target: Callable[..., Any], *args: Any) -> Node:
        return insert(self._graph, target, args, like=at)

    def _cast(self, at: Node, x: Node, dtype: torch.dtype | None) -> Node:
        return x if dtype_of(x) == dtype else self._call(at, aten.to.dtype, x, dtype)

    @FORMS.rule(own.dynamic_scale.default)
    def _dynamic_scale(self, at: Node, x: Node, dtype: torch.dtype, per_row: bool) -> Node:
        sizes = self._call(at, aten.abs.default, x)
        largest = self._call(at, aten.amax.default, sizes, *(([-1], True) if per_row else ([],)))
        wide = self._cast(at, largest, torch.float32)
        scale = self._call(at, aten.div.Tensor, wide, LIMITS.get(dtype, 1.0))
        return self._call(at, aten.clamp.default, scale, SMALLEST_SCALE)

    @FORMS.rule(own.quantize.default)
    def _quantize(self, at: Node, x: Node, scale: Node, dtype: torch.dtype) -> Node:
        wide = self._cast(at, x, torch.float32)
        scaled = self._call(at, aten.div.Tensor, wide, scale)
        return self._rounded(at, scaled, LIMITS.get(dtype), dtype)

    def _rounded(self, at: Node, x: Node, limit: float | None, dtype: torch.dtype) -> Node:
        if not dtype.is_floating_point:
            x = self._call(at, aten.round.default, x)
        if limit is not None:
            x = self._call(at, aten.clamp.default, x, -limit, limit)
        return self._cast(at, x, dtype)

    @FORMS.rule(own.quantize_blocks.default)
    def _quantize_blocks(self, at: Node, x: Node, scale: Node, bits: int) -> Node:
        blocks = self._blocks(at, self._cast(at, x, torch.float32), shape_of(scale)[-1])
        column = self._call(at, aten.unsqueeze.default, scale, -1)
        scaled = self._call(at, aten.div.Tensor, blocks, column)
        found = self._rounded(at, scaled, 2.0 ** (bits - 1) - 1, torch.int8)
        return self._call(at, aten.flatten.using_ints, found, -2, -1)

    @FORMS.rule(own.dequantize.default)
    def _dequantize(self, at: Node, q: Node, scale: Node, dtype: torch.dtype) -> Node:
        wide = self._cast(at, q, torch.float32)
        return self._cast(at, self._call(at, aten.mul.Tensor, wide, scale), dtype)

    @FORMS.rule(own.quantized_linear.default)
    def _quantized_linear(
        self,
        at: Node,
        x: Node,
        x_scale: Node,
        weight: Node,
        weight_scale: Node,
        bias: Node | None,
        dtype: torch.dtype,
    ) -> Node:
        form = self._int_mm if dtype_of(x) == torch.int8 else self._scaled_mm
        rows = self._rows(at, x, shape_of(x)[-1])
        found = form(at, rows, x_scale, weight, weight_scale, bias, dtype)
        if len(shape_of(x)) == 2:
            return found
        sizes = [self._size(at, x, dim) for dim in range(len(shape_of(x)) - 1)]
        return self._call(at, aten.reshape.default, found, [*sizes, shape_of(weight)[0]])

    def _scaled_mm(
        self,
        at: Node,
        x: Node,
        x_scale: Node,
        weight: Node,
        weight_scale: Node,
        bias: Node | None,
        dtype: torch.dtype,
    ) -> Node:
        if shape_of(x_scale) or shape_of(weight_scale):  # both by rows, or both not
            x_scale = self._column(at, x_scale, self._size(at, x, 0))
            columns = self._column(at, weight_scale, shape_of(weight)[0])
            weight_scale = self._call(at, aten.reshape.default, columns, [1, -1])
        columns = self._call(at, aten.t.default, weight)  # column-major
        is_fused = bias is not None and dtype != torch.float32
        inside = self._cast(at, bias, dtype) if bias is not None and is_fused else None
        found = self._call(
            at,
            aten._scaled_mm.default,
            *(x, columns, x_scale, weight_scale, inside, None, dtype, self._device == "cuda"),
        )
        if bias is None or is_fused:
            return found
        return self._call(at, aten.add.Tensor, found, bias)

    def _int_mm(
        self,
        at: Node,
        x: Node,
        x_scale: Node,
        weight: Node,
        weight_scale: Node,
        bias: Node | None,
        dtype: torch.dtype,
    ) -> Node:
        rows, padded = self._size(at, x, 0), x
        if self._device == "cuda":
            _check_integer_sizes(at, *shape_of(weight))
            padded = self._call(at, aten.constant_pad_nd.default, x, [0, 0, 0, _LEAST_ROWS], 0)
        columns = self._call(at, aten.t.default, weight)
        product = self._call(at, aten._int_mm.default, padded, columns)
        if padded is not x:
            product = self._call(at, aten.slice.Tensor, product, 0, 0, rows)
        found = self._cast(at, product, torch.float32)
        if shape_of(x_scale):
            x_scale = self._rows(at, x_scale, 1)
        if shape_of(weight_scale):
            weight_scale = self._call(at, aten.reshape.default, weight_scale, [1, -1])
        for scale in (x_scale, weight_scale):
            found = self._call(at, aten.mul.Tensor, found, scale)
        if bias is not None:
            wide = self._cast(at, bias, torch.float32)
            found = self._call(at, aten.add.Tensor, found, wide)
        return self._cast(at, found, dtype)

    @FORMS.rule(own.blockwise_linear.default)
    def _blockwise_linear(
        self,
        at: Node,
        x: Node,
        weight: Node,
        weight_scale: Node,
        bias: Node | None,
        bits: int,
        activations: bool,
    ) -> Node:
        blocks, dtype = shape_of(weight_scale)[1], dtype_of(x)
        wide = self._blocks(at, self._cast(at, weight, torch.float32), blocks)
        scale = self._call(at, aten.unsqueeze.default, weight_scale, -1)
        scaled = self._call(at, aten.mul.Tensor, wide, scale)
        flat = self._call(at, aten.flatten.using_ints, scaled, -2, -1)
        if activations:
            x = self._by_blocks(at, x, blocks)
        args = (x, self._cast(at, flat, dtype), bias)
        return self._call(at, aten.linear.default, *args)

    def _by_blocks(self, at: Node, x: Node, blocks: int) -> Node:
        """x as it is after its blocks were rounded to int8."""
        rows = self._blocks(at, self._cast(at, x, torch.float32), blocks)
        scale = self._dynamic_scale(at, rows, torch.int8, True)
        scaled = self._call(at, aten.div.Tensor, rows, scale)
        rounded = self._call(at, aten.round.default, scaled)
        found = self._call(at, aten.mul.Tensor, rounded, scale)
        flat = self._call(at, aten.flatten.using_ints, found, -2, -1)
        return self._cast(at, flat, dtype_of(x))

    def _blocks(self, at: Node, x: Node, blocks: int) -> Node:
        """[..., K] as [..., blocks, K / blocks]."""
        return self._call(at, aten.unflatten.int, x, -1, [blocks, shape_of(x)[-1] // blocks])

    def _rows(self, at: Node, x: Node, columns: int) -> Node:
        """[..., columns] as a matrix."""
        if len(shape_of(x)) == 2:
            return x
        return self._call(at, aten.reshape.default, x, [-1, columns])

    def _column(self, at: Node, scale: Node, rows: Any) -> Node:
        """A scale for each row, [rows, 1], contiguous."""
        if shape_of(scale):
            return self._rows(at, scale, 1)
        one = self._call(at, aten.reshape.default, scale, [1, 1])
        return self._call(at, aten.repeat.default, one, [rows, 1])

    def _size(self, at: Node, x: Node, dim: int) -> Any:
        size = shape_of(x)[dim]
        return size if isinstance(size, int) else self._call(at, aten.sym_size.int, x, dim)


def _check_integer_sizes(at: Node, n: int, k: int) -> None:
    if n % _MULTIPLE or k % _MULTIPLE:
        raise LoweringError(
            f"{module_path(at)}: CUDA multiplies int8 where K and N are multiples of {_MULTIPLE}, "
            f"got K={k} and N={n}",
            hint="Keep this layer in the plan.",
        )
