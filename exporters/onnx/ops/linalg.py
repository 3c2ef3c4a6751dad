"""Linear algebra of matrices of known size, step by step, in fp64; distances of rows.

ONNX has no solvers.  Elimination with the largest pivot and substitution are the algorithms of
LAPACK, which torch calls; what they lose in fp64 is far below fp32.

Where torch raises an error, as for a matrix that is singular or not positive definite, the result
is NaN, which a run refuses.  A matrix that is singular in fp32's rounding alone has the inverse
that fp64 gives it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from onnxscript import opset23 as op
from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.ops.registry import form, refuse, torch_form
from enginecast.exporters.onnx.ops.values import ints, like
from enginecast.passes.ir.edit import aten, dtype_of, shape_of

LARGEST = 64
"""Rows of a matrix that is written out so."""


def _is_small(node: Node) -> bool:
    """Whether an op reads real matrices whose sizes are known, and not large; what it says of
    errors must not be read.
    """
    sources = [s for s in node.all_input_nodes if _is_real(s)]
    sizes = [size for source in sources for size in shape_of(source)[-2:]]
    known = all(isinstance(size, int) and 0 < size <= LARGEST for size in sizes)
    return bool(sources) and known


def _is_real(node: Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def _with_batch(x: Tensor, batch: Sequence[Any]) -> Tensor:
    return x.expand(*batch, *x.shape[-2:])


def _eliminated(a: Tensor, b: Tensor) -> list[Tensor]:
    """The rows [..., 1, columns] that elimination leaves of [a | b], each from its pivot on."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left = torch.cat([_with_batch(a, batch), _with_batch(b, batch)], -1)
    rows: list[Tensor] = []
    for size in range(a.size(-1), 0, -1):
        if size > 1:
            place = left[..., 0].abs().argmax(-1, keepdim=True)
            numbers = torch.arange(size)
            order = torch.where(numbers == 0, place, torch.where(numbers == place, 0, numbers))
            left = left.gather(-2, order.unsqueeze(-1).expand(left.shape))
        pivot = left[..., :1, :]
        rows.append(pivot)
        by = torch.where(pivot[..., :1] == 0, 1.0, pivot[..., :1])  # all below it are 0, too
        factors = left[..., 1:, :1] / by
        left = left[..., 1:, 1:] - factors * pivot[..., 1:]
    return rows


def _solved(a: Tensor, b: Tensor) -> Tensor:
    """The x of a @ x = b, in fp64; NaN where a is singular, for which torch raises an error."""
    rows = _eliminated(a, b)
    found: Any = None
    for above, row in enumerate(reversed(rows)):
        right = row[..., 1 + above :]
        if above:
            right = right - row[..., 1 : 1 + above] @ found
        this = right / row[..., :1]
        found = this if found is None else torch.cat([this, found], -2)
    pivots = torch.cat([row[..., :1] for row in rows], -2)
    is_singular = (pivots == 0).any(-2, keepdim=True)
    return torch.where(is_singular, math.nan, found)


@torch_form(aten.linalg_inv.default, aten.inverse.default, when=_is_small)
def _inverse(x: Tensor) -> Tensor:
    return _solved(_wide(x), torch.eye(x.size(-1), dtype=torch.float64)).to(x.dtype)


@torch_form(aten.linalg_solve.default, when=_is_small)
def _solve(a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    wide, right = _wide(a), _wide(b.unsqueeze(-1) if is_vector else b)
    found = _solved(wide, right) if left else _solved(wide.mT, right.mT).mT
    return (found.squeeze(-1) if is_vector else found).to(a.dtype)


@torch_form(aten.linalg_cholesky.default, when=_is_small)
def _cholesky(x: Tensor, upper: bool = False) -> Tensor:
    """Columns of the lower triangle."""
    left = _wide(x).mT if upper else _wide(x)
    size = x.size(-1)
    columns: list[Tensor] = []
    for at in range(size):
        first = left[..., :1, :1]
        root = torch.where(first > 0, first, math.nan).sqrt()
        below = left[..., 1:, :1] / root
        zeros = torch.zeros_like(left[..., :1, :1]).expand(*left.shape[:-2], at, 1)
        columns.append(torch.cat([zeros, root, below], -2))
        left = left[..., 1:, 1:] - below * below.mT
    found = torch.cat(columns, -1)
    return (found.mT if upper else found).to(x.dtype)


refuse(aten.logdet.default, reason="its determinant leaves the range")


@form(aten._cdist_forward.default)
def _cdist(x: Any, y: Any, p: float, compute_mode: int | None = None) -> Any:
    """Distances of all rows to all rows, from their differences."""
    return _norm_of(op.Abs(op.Sub(op.Unsqueeze(x, ints(-2)), op.Unsqueeze(y, ints(-3)))), x, p)


def _norm_of(apart: Any, x: Any, p: float) -> Any:
    """The norms of absolute values along the last dimension, in the dtype of `x`."""
    last = ints(-1)
    if p == 0:
        differs = op.Not(op.Equal(apart, like(x, 0.0)))
        return op.ReduceSum(op.CastLike(differs, x), last, keepdims=0)
    if p == 1:
        return op.ReduceSum(apart, last, keepdims=0)
    if p == math.inf:
        return op.ReduceMax(apart, last, keepdims=0)
    if p == 2:
        return op.Sqrt(op.ReduceSum(op.Mul(apart, apart), last, keepdims=0))
    total = op.ReduceSum(op.Pow(apart, like(x, p)), last, keepdims=0)
    return op.Pow(total, like(x, 1 / p))
