"""Decompose quantized operators into torch's own: `torch._scaled_mm` and the rounding around it.

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
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import functional

from enginecast.errors import LoweringError
from enginecast.ops.rules import Rules
from enginecast.ops.traits import OWN
from enginecast.passes.ir.base import Pass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import arguments, dtype_of, erase_dead, shape_of
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.rules import apply_rules, insert_traced
from enginecast.passes.ir.source import module_path

_LEAST_ROWS = 16
"""CUDA's integer product takes more rows than that."""
_MULTIPLE = 8
"""And K and N that are multiples of this one."""

FORMS: Rules[Callable[..., Tensor]] = Rules()
"""Op -> its plain form in torch; where that depends on the device, it takes `cuda`."""
for _op in (
    *(own.dynamic_scale, own.power_of_two, own.quantize, own.quantize_blocks, own.dequantize),
    *(own.quantize_affine, own.dequantize_affine, own.quantized_conv, own.quantized_add),
    *(own.quantized_lstm, own.quantized_gru),
):
    FORMS[_op.default] = OWN[_op.default].definition


@dataclass(frozen=True)
class DecomposeQuantized(Pass):
    """Decompose our quantized ops into aten ops.

    A weight stays quantized only where it was hoisted: as plain ops, what brings it back to floats
    is a weight expression like any other.

    Raises:
        LoweringError: an integer product of a size that CUDA does not take.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """The integer product has rules on the latter."""

    name: ClassVar[str] = "decompose-quantized"
    after: ClassVar[frozenset[str]] = frozenset({"hoist-weights"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        sites = apply_rules(program, context, dict.fromkeys(FORMS, self._rewrite))
        erase_dead(program.graph)
        return sites

    def _rewrite(self, program: ProgramView, node: Node) -> Node:
        form = FORMS[node.target]
        if node.target is own.quantized_linear.default:
            x, _, weight, *_ = arguments(node)
            n, k = shape_of(weight)
            is_integer = self.device == "cuda" and dtype_of(x) == torch.int8
            if is_integer and (n % _MULTIPLE or k % _MULTIPLE):
                raise LoweringError(
                    f"{module_path(node)}: CUDA multiplies int8 where K and N are multiples of"
                    f" {_MULTIPLE}, got K={k} and N={n}",
                    hint="Keep this layer in the plan.",
                )
            form = partial(form, cuda=self.device == "cuda")
        found: Node = insert_traced(program, node, form)
        return found


@FORMS.rule(own.quantized_linear.default)
def _quantized_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    cuda: bool,
) -> Tensor:
    form = _int_mm if x.dtype == torch.int8 else _scaled_mm
    product = form(_rows(x), x_scale, weight, weight_scale, bias, dtype, cuda)
    return product if x.dim() == 2 else product.reshape(*x.shape[:-1], weight.shape[0])


def _scaled_mm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    cuda: bool,
) -> Tensor:
    if x_scale.dim() or weight_scale.dim():  # both by rows, or both not
        x_scale = _column(x_scale, x.shape[0])
        weight_scale = _column(weight_scale, weight.shape[0]).reshape(1, -1)
    inside = bias.to(dtype) if bias is not None and dtype != torch.float32 else None
    columns = weight.t()  # column-major
    product = torch._scaled_mm(x, columns, x_scale, weight_scale, inside, None, dtype, cuda)
    return product if bias is None or inside is not None else product + bias


def _int_mm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    cuda: bool,
) -> Tensor:
    if cuda:
        padded = torch.constant_pad_nd(x, [0, 0, 0, _LEAST_ROWS], 0)
        product = torch._int_mm(padded, weight.t())[: x.shape[0]]
    else:
        product = torch._int_mm(x, weight.t())
    x_scale = _rows(x_scale) if x_scale.dim() else x_scale
    weight_scale = weight_scale.reshape(1, -1) if weight_scale.dim() else weight_scale
    scaled = product.float() * x_scale * weight_scale
    return (scaled if bias is None else scaled + bias.float()).to(dtype)


@FORMS.rule(own.blockwise_linear.default)
def _blockwise_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    activations: bool,
) -> Tensor:
    """Multiplies in the dtype of x."""
    blocks = (weight_scale.shape[1], -1)
    wide = weight.float().unflatten(-1, blocks) * weight_scale.unsqueeze(-1)
    if activations:
        rows = x.float().unflatten(-1, blocks)
        scale = OWN[own.dynamic_scale.default].definition(rows, torch.int8, True)
        x = ((rows / scale).round() * scale).flatten(-2).to(x.dtype)
    return functional.linear(x, wide.flatten(-2).to(x.dtype), bias)


def _rows(x: Tensor) -> Tensor:
    """[..., columns] as a matrix."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _column(scale: Tensor, rows: int | torch.SymInt) -> Tensor:
    """A scale for each row, [rows, 1], contiguous."""
    return _rows(scale) if scale.dim() else scale.reshape(1, 1).repeat(rows, 1)
