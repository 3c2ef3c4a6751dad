"""Linear algebra of matrices of known size, step by step, in fp64.

ONNX has no solvers. Elimination with the largest pivot, substitution, and products of reflections
are the algorithms of LAPACK, which torch calls; what they lose in fp64 is far below fp32.

Where torch raises an error, as for a matrix that is singular or not positive definite, the result
is NaN, which a run refuses. A matrix that is singular in fp32's rounding alone has the inverse that
fp64 gives it. What depends on rounding in fp32 has no form here, for another rounding would make it
another result: pivots of an LU decomposition, codes of errors, signs of singular vectors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from enginecast.passes.ir.edit import aten, dtype_of, shape_of

LARGEST = 64
"""Rows of a matrix that is written out so."""


def is_small_matrix(node: Node) -> bool:
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


def _eye(size: int, columns: int | None = None) -> Tensor:
    return torch.eye(size, columns or size, dtype=torch.float64)


def _with_batch(x: Tensor, batch: Sequence[Any]) -> Tensor:
    return x.expand(*batch, *x.shape[-2:])


def _eliminated(a: Tensor, b: Tensor) -> tuple[list[Tensor], Tensor]:
    """The rows [..., 1, columns] that elimination leaves of [a | b], each from its pivot on, and a
    sign [...] for how often rows were swapped.
    """
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left = torch.cat([_with_batch(a, batch), _with_batch(b, batch)], -1)
    rows: list[Tensor] = []
    sign: Any = None
    for size in range(a.size(-1), 0, -1):
        if size > 1:
            place = left[..., 0].abs().argmax(-1, keepdim=True)
            numbers = torch.arange(size)
            order = torch.where(numbers == 0, place, torch.where(numbers == place, 0, numbers))
            left = left.gather(-2, order.unsqueeze(-1).expand(left.shape))
            turned = torch.where(place.squeeze(-1) == 0, 1.0, -1.0).to(torch.float64)
            sign = turned if sign is None else sign * turned
        pivot = left[..., :1, :]
        rows.append(pivot)
        by = torch.where(pivot[..., :1] == 0, 1.0, pivot[..., :1])  # all below it are 0, too
        factors = left[..., 1:, :1] / by
        left = left[..., 1:, 1:] - factors * pivot[..., 1:]
    return rows, torch.ones(batch, dtype=torch.float64) if sign is None else sign


def _solved(a: Tensor, b: Tensor) -> Tensor:
    """The x of a @ x = b, in fp64; NaN where a is singular, for which torch raises an error."""
    rows, _ = _eliminated(a, b)
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


def _substituted(a: Tensor, b: Tensor, upper: bool, unit: bool = False) -> Tensor:
    """The x of a @ x = b, where only one triangle of a is read."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = _with_batch(a, batch), _with_batch(b, batch)
    size = a.size(-1)
    found: Any = None
    for step in range(size):
        at = size - 1 - step if upper else step
        this = b[..., at : at + 1, :]
        if step:
            factors = a[..., at : at + 1, at + 1 :] if upper else a[..., at : at + 1, :at]
            this = this - factors @ found
        if not unit:
            this = this / a[..., at : at + 1, at : at + 1]
        parts = [] if found is None else [found]
        found = torch.cat([this, *parts] if upper else [*parts, this], -2)
    result: Tensor = found
    return result


def _inverse(x: Tensor) -> Tensor:
    return _solved(_wide(x), _eye(x.size(-1))).to(x.dtype)


def _solve(a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    wide, right = _wide(a), _wide(b.unsqueeze(-1) if is_vector else b)
    found = _solved(wide, right) if left else _solved(wide.mT, right.mT).mT
    return (found.squeeze(-1) if is_vector else found).to(a.dtype)


def _slogdet(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, sign = _eliminated(_wide(x), _wide(x)[..., :0])
    pivots = torch.cat([row[..., 0] for row in rows], -1)
    sign = sign * pivots.sign().prod(-1)
    return sign.to(x.dtype), pivots.abs().log().sum(-1).to(x.dtype)


def _tensorinv(x: Tensor, ind: int = 2) -> Tensor:
    first, last = x.shape[:ind], x.shape[ind:]
    found = _inverse(x.reshape(math.prod(first), math.prod(last)))
    return found.reshape(*last, *first)


def _tensorsolve(a: Tensor, b: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    moved = a
    if dims is not None:
        places = [dim % a.dim() for dim in dims]
        moved = a.permute([dim for dim in range(a.dim()) if dim not in places] + places)
    shape = moved.shape[b.dim() :]
    size = math.prod(shape)
    return _solve(moved.reshape(size, size), b.reshape(size)).reshape(shape)


def _solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    wide, right = _wide(a), _wide(b)
    if left:
        return _substituted(wide, right, upper, unitriangular).to(a.dtype)
    return _substituted(wide.mT, right.mT, not upper, unitriangular).mT.to(a.dtype)


def _triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """The solution, and the matrix."""
    wide = _wide(a).mT if transpose else _wide(a)
    found = _substituted(wide, _wide(b), upper != transpose, unitriangular)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return found.to(a.dtype), _with_batch(a, batch).clone()


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


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    lower = _wide(factor).mT if upper else _wide(factor)
    between = _substituted(lower, _wide(b), False)
    return _substituted(lower.mT, between, True).to(factor.dtype)


def _order(pivots: Tensor, size: int, *, is_undone: bool = False) -> Tensor:
    """Where each row comes from after rows were swapped with those that pivots name, from 1."""
    numbers = torch.arange(size)
    order = numbers.expand(*pivots.shape[:-1], size)
    steps = range(pivots.size(-1))
    for at in reversed(steps) if is_undone else steps:
        other = pivots[..., at : at + 1].to(torch.int64) - 1
        this, that = order[..., at : at + 1], order.gather(-1, other)
        order = torch.where(numbers == at, that, torch.where(numbers == other, this, order))
    return order


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    batch = torch.broadcast_shapes(x.shape[:-2], order.shape[:-1])
    wide = _with_batch(x, batch)
    return wide.gather(-2, order.unsqueeze(-1).expand(wide.shape))


def _linalg_lu_solve(
    lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    wide, right = _wide(lu), _wide(b) if left else _wide(b).mT
    size = lu.size(-1)
    if adjoint == left:  # the transposed matrix
        between = _substituted(wide.mT, right, False)
        between = _substituted(wide.mT, between, True, True)
        found = _ordered(between, _order(pivots, size, is_undone=True))
    else:
        between = _substituted(wide, _ordered(right, _order(pivots, size)), False, True)
        found = _substituted(wide, between, True)
    return (found if left else found.mT).to(lu.dtype)


def _lu_solve(b: Tensor, lu: Tensor, pivots: Tensor) -> Tensor:
    return _linalg_lu_solve(lu, pivots, b)


def _lu_unpack(
    lu: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The permutation, and both triangles; what is not asked for is empty."""
    rows, columns = lu.shape[-2:]
    least = min(rows, columns)
    nothing = lu.new_zeros(0)
    order, lower, upper = nothing, nothing, nothing
    if unpack_pivots:
        places = _order(pivots, rows).unsqueeze(-2)
        order = (torch.arange(rows).unsqueeze(-1) == places).to(lu.dtype)
    if unpack_data:
        lower = lu[..., :, :least].tril(-1) + _eye(rows, least).to(lu.dtype)
        upper = lu[..., :least, :].triu()
    return order, lower, upper


def _reflected(a: Tensor, tau: Tensor, x: Tensor, *, is_first_last: bool) -> Tensor:
    """A matrix after the reflections that a and tau hold; each changes the rows from its own on."""
    steps = range(tau.size(-1))
    for at in reversed(steps) if is_first_last else steps:
        factor, below = tau[..., at, None, None], a[..., at + 1 :, at : at + 1]
        x = torch.cat([x[..., :at, :], _one_reflection(factor, below, x[..., at:, :])], -2)
    return x


def _one_reflection(factor: Tensor, below: Tensor, x: Tensor) -> Tensor:
    normal = torch.cat([torch.ones_like(factor), below], -2)
    moved = x - normal * (factor * (normal.mT @ x))
    return torch.where(factor == 0, x, moved)  # whatever the normal


def _householder_product(a: Tensor, tau: Tensor) -> Tensor:
    """From the last reflection on, whose first column is that of an identity."""
    wide, factors = _wide(a), _wide(tau)
    rows, columns, steps = *a.shape[-2:], tau.size(-1)
    found = _eye(rows - steps, columns - steps).expand(*a.shape[:-2], -1, -1)
    for at in reversed(range(steps)):
        factor, below = factors[..., at, None, None], wide[..., at + 1 :, at : at + 1]
        first = torch.cat([1 - factor, -factor * below], -2)
        above = torch.zeros_like(factor).expand(*a.shape[:-2], 1, columns - at - 1)
        if at + 1 == columns:
            found = first
            continue
        rest = above if at + 1 == rows else torch.cat([above, found], -2)
        found = torch.cat([first, _one_reflection(factor, below, rest)], -1)
    return found.to(a.dtype)


def _ormqr(
    a: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False
) -> Tensor:
    wide, factors = _wide(a), _wide(tau)
    if left:
        found = _reflected(wide, factors, _wide(other), is_first_last=not transpose)
    else:
        found = _reflected(wide, factors, _wide(other).mT, is_first_last=transpose).mT
    return found.to(a.dtype)


def _matrix_power(x: Tensor, n: int) -> Tensor:
    if n == 0:
        return _eye(x.size(-1)).to(x.dtype).expand(x.shape).clone()
    power = _wide(x) if n > 0 else _solved(_wide(x), _eye(x.size(-1)))
    n, result = abs(n), None
    while n:
        if n & 1:
            result = power if result is None else result @ power
        n >>= 1
        power = power @ power if n else power
    assert result is not None
    return result.to(x.dtype)


def is_vandermonde(node: Node) -> bool:
    """Whether a Vandermonde matrix is of floats, and its columns are known."""
    columns = shape_of(node)[-1]
    return _is_real(node) and isinstance(columns, int) and 0 < columns <= LARGEST


def _vander(x: Tensor, N: int | None = None) -> Tensor:  # noqa: N803 - as torch calls it
    columns = x.size(-1) if N is None else N
    wide = _wide(x)
    powers = [torch.ones_like(wide)]
    for _ in range(1, columns):
        powers.append(powers[-1] * wide)
    return torch.stack(powers, -1).to(x.dtype)


LINEAR: Mapping[Any, Callable[..., Tensor]] = {
    aten.linalg_inv.default: _inverse,
    aten.inverse.default: _inverse,
    aten.linalg_solve.default: _solve,
    aten.linalg_tensorinv.default: _tensorinv,
    aten.linalg_tensorsolve.default: _tensorsolve,
    aten.linalg_solve_triangular.default: _solve_triangular,
    aten.linalg_cholesky.default: lambda x, *, upper=False: _cholesky(x, upper),
    aten.cholesky.default: _cholesky,
    aten.cholesky_solve.default: _cholesky_solve,
    aten.linalg_lu_solve.default: _linalg_lu_solve,
    aten.lu_solve.default: _lu_solve,
    aten.linalg_householder_product.default: _householder_product,
    aten.orgqr.default: _householder_product,
    aten.ormqr.default: _ormqr,
    aten.linalg_matrix_power.default: _matrix_power,
    aten.matrix_power.default: _matrix_power,
}
"""Op of one result -> its form."""
SEVERAL: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = {
    aten.linalg_slogdet.default: _slogdet,
    aten.slogdet.default: _slogdet,
    aten.triangular_solve.default: _triangular_solve,
    aten.lu_unpack.default: _lu_unpack,
}
"""Op of several results -> its form."""
VANDER = (aten.linalg_vander.default, _vander)
