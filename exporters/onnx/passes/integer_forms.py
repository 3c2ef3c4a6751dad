"""Ops of integers and booleans that ONNX has of other dtypes alone, as ops that it has of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from enginecast.passes.ir.edit import aten, dtype_of, first_input, shape_of
from enginecast.passes.ir.varying_sizes import may_be_zero


def reads_bools(node: Node) -> bool:
    """Whether all tensors that an op reads are booleans."""
    return all(dtype_of(source) == torch.bool for source in node.all_input_nodes)


def reads_narrow(node: Node) -> bool:
    """Whether an op reads integers of fewer than 64 bits."""
    found = (dtype_of(source) for source in node.all_input_nodes)
    return any(dtype in _NARROW for dtype in found)


def _einsum(equation: str, operands: Sequence[Tensor], **_: Any) -> Tensor:
    """In int64, whose last bits are those of narrower integers."""
    dtype = torch.einsum(equation, *operands).dtype
    return torch.einsum(equation, *(each.to(torch.int64) for each in operands)).to(dtype)


def _bilinear(one: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dtype = weight.dtype
    wide = (None if x is None else x.to(torch.int64) for x in (one, other, weight, bias))
    found: Tensor = aten.bilinear.default(*wide)
    return found.to(dtype)


def _trace(x: Tensor) -> Tensor:
    return torch.diagonal(x).to(torch.int64).sum()


def _isclose(
    x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    dtype = torch.get_default_dtype()
    return torch.isclose(x.to(dtype), y.to(dtype), rtol, atol, equal_nan)


def _addr(x: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """What is times False is left out."""
    found = one.unsqueeze(1) & other if alpha else torch.zeros_like(one.unsqueeze(1) & other)
    return x | found if beta else found.expand(torch.broadcast_shapes(x.shape, found.shape))


def _sizes_are_positive(node: Node) -> bool:
    """Whether there are dimensions, and elements along each."""
    sizes = shape_of(first_input(node))
    return bool(sizes) and not any(map(may_be_zero, sizes))


def _nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Each element of a tensor that is not 0 writes its number in its place, the rest beyond."""
    flat = (x if x.dtype == torch.bool else x != 0).reshape(-1)
    order = flat.to(torch.int64).cumsum(0) - 1
    places = torch.where(flat & (order < size), order, size)
    numbers = torch.arange(flat.size(0))
    found = torch.full((size + 1,), -1).scatter(0, places, numbers).narrow(0, 0, size)
    left = found.clamp(min=0)
    axes: list[Tensor] = []
    for along in reversed(x.shape):
        axes.append(left % along)
        left = left // along
    return torch.where((found >= 0).unsqueeze(-1), torch.stack(axes[::-1], -1), fill_value)


def _size_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The absolute value that a dtype holds, which has none of its lowest number."""
    return x.to(torch.int64).abs().to(dtype).to(torch.int64)


def _gcd(x: Tensor, y: Tensor) -> Tensor:
    """Euclid's algorithm, with as many steps as the dtype may need."""
    dtype = _promoted(x, y)
    return _divisor(x.to(dtype), y.to(dtype), dtype).to(dtype)


def _promoted(x: Tensor, y: Tensor) -> torch.dtype:
    """The dtype that torch gives two tensors of integers; numbers do not widen tensors."""
    if (x.dim() == 0) != (y.dim() == 0):
        return x.dtype if x.dim() else y.dtype
    if x.dtype != y.dtype and x.itemsize == y.itemsize:
        return torch.int16  # of int8 and uint8
    return x.dtype if x.itemsize >= y.itemsize else y.dtype


def _divisor(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    small, large = _size_in(x, dtype), _size_in(y, dtype)
    for _ in range(_STEPS[dtype]):
        is_done = small == 0
        by = torch.where(is_done, 1, small)
        # ONNX Runtime (1.31) has fmod of integers by way of fp64, and divides them as they are.
        rest = large - torch.div(large, by, rounding_mode="trunc") * by
        large = torch.where(is_done, large, small)
        small = torch.where(is_done, 0, rest)
    return large


def _lcm(x: Tensor, y: Tensor) -> Tensor:
    dtype = _promoted(x, y)
    x, y = x.to(dtype), y.to(dtype)
    by = _divisor(x, y, dtype).abs()  # no divisor is -1, by which C cannot divide the lowest number
    quotient = torch.div(x.to(torch.int64), torch.where(by == 0, 1, by), rounding_mode="trunc")
    found = torch.where(by == 0, 0, quotient * y.to(torch.int64))
    # C multiplies narrower integers in int32, and takes the size of that.
    return found.to(dtype).abs() if dtype == torch.int32 else found.abs().to(dtype)


def _reads_integers(node: Node) -> bool:
    """Whether all tensors that an op reads are integers."""
    return all(dtype_of(source) in _STEPS for source in node.all_input_nodes)


_STEPS: Mapping[torch.dtype, int] = {
    torch.uint8: 13,
    torch.int8: 13,
    torch.int16: 24,
    torch.int32: 47,
    torch.int64: 93,
}
"""Of Euclid's algorithm: it takes most for numbers of Fibonacci."""
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
FORMS: Mapping[Any, tuple[Callable[[Node], bool], Callable[..., Tensor]]] = {
    aten.einsum.default: (reads_narrow, _einsum),
    aten.bilinear.default: (reads_narrow, _bilinear),
    aten.trace.default: (reads_narrow, _trace),
    aten.isclose.default: (reads_bools, _isclose),
    aten.heaviside.default: (reads_bools, torch.logical_or),
    aten.addr.default: (reads_bools, _addr),
    aten.nonzero_static.default: (_sizes_are_positive, _nonzero_static),
    aten.gcd.default: (_reads_integers, _gcd),
    aten.lcm.default: (_reads_integers, _lcm),
}
"""Op -> for which calls, and what it is then."""
