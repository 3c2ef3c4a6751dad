"""Ops of integers and booleans that ONNX has of other dtypes alone, as ops that it has of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from enginecast.passes.ir.edit import aten, dtype_of


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


def _addr(
    x: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """What is times False is left out."""
    found = one.unsqueeze(1) & other if alpha else torch.zeros_like(one.unsqueeze(1) & other)
    return x | found if beta else found.expand(torch.broadcast_shapes(x.shape, found.shape))


_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
FORMS: Mapping[Any, tuple[Callable[[Node], bool], Callable[..., Tensor]]] = {
    aten.einsum.default: (reads_narrow, _einsum),
    aten.bilinear.default: (reads_narrow, _bilinear),
    aten.trace.default: (reads_narrow, _trace),
    aten.isclose.default: (reads_bools, _isclose),
    aten.heaviside.default: (reads_bools, torch.logical_or),
    aten.addr.default: (reads_bools, _addr),
}
"""Op -> for which calls, and what it is then."""
