"""Composite kernels that round on the way, where a profile says so.

The kernels take and return tensors of the storage dtype.  torch's elementwise ops on the CPU
compute one op in fp32 and round it, so a kernel whose every step is rounded is written as plain
torch; sums are those of `emulate_rounding`, since torch keeps its own in fp32.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from enginecast.verify.emulate_attention import attention, sdpa
from enginecast.verify.emulate_profiles import How, Profile
from enginecast.verify.emulate_rounding import product, softmax_steps, total, tree_sum

Kernel = Callable[..., Any]


def kernel_of(node: Node, profile: Profile) -> Kernel | None:
    """The kernel that rounds on the way where the profile has one; None: fp32 inside."""
    found = _KERNELS.get(str(node.target))
    if found is None:
        return None
    kind, build = found
    how = getattr(profile, kind).how
    return None if how == "fp32" else build(how, profile)


def _sum(how: How, profile: Profile) -> Kernel:
    def kernel(x: Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
        return _kept(total(x, _dims(x, dims), profile), x, dims, keepdim)

    return kernel


def _mean(how: How, profile: Profile) -> Kernel:
    def kernel(x: Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
        found = total(x, _dims(x, dims), profile)
        return _kept(found / (x.numel() / max(found.numel(), 1)), x, dims, keepdim)

    return kernel


def _dims(x: Tensor, dims: Any) -> tuple[int, ...]:
    return tuple(dims) if dims else tuple(range(x.dim()))


def _kept(found: Tensor, x: Tensor, dims: Any, keepdim: bool) -> Tensor:
    return found if keepdim else found.squeeze(_dims(x, dims))


def _rms_norm(how: How, profile: Profile) -> Kernel:
    def kernel(
        x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        dims = tuple(range(-len(shape), 0))
        mean = total(x * x, dims, profile) / math.prod(shape)
        mean, x = _after_statistics(mean, x, how)
        found = x * _reciprocal_root(mean, eps)
        return found if weight is None else found * weight

    return kernel


def _layer_norm(how: How, profile: Profile) -> Kernel:
    def kernel(
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Tensor:
        dims, size = tuple(range(-len(shape), 0)), math.prod(shape)
        centred = x - total(x, dims, profile) / size
        variance = total(centred * centred, dims, profile) / size
        variance, centred = _after_statistics(variance, centred, how)
        found = centred * _reciprocal_root(variance, eps)
        found = found if weight is None else found * weight
        return found if bias is None else found + bias

    return kernel


def _skip_rms_norm(how: How, profile: Profile) -> Kernel:
    """As ONNX Runtime's kernel did: every square is divided by the size before it is added."""

    def kernel(
        x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        share = torch.tensor(1 / total.shape[-1], dtype=x.dtype)
        mean = tree_sum(total * share * total, -1)
        return total * _reciprocal_root(mean, epsilon) * weight, total

    return kernel


def _after_statistics(statistic: Tensor, x: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Statistics that are stored are read back into fp32; the result is rounded at the end."""
    return (statistic.float(), x.float()) if how == "stored" else (statistic, x)


def _reciprocal_root(mean: Tensor, eps: float | None) -> Tensor:
    eps = torch.finfo(mean.dtype).eps if eps is None else eps
    root: Tensor = (mean + eps).sqrt().reciprocal()
    return root


def _softmax(how: How, profile: Profile) -> Kernel:
    def kernel(x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
        return softmax_steps(x, dim, profile)

    return kernel


def _gelu(how: How, profile: Profile) -> Kernel:
    def kernel(x: Tensor, approximate: str = "none") -> Tensor:
        if approximate == "tanh":
            inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
            return x * 0.5 * (inner.tanh() + 1)
        return x * 0.5 * ((x * math.sqrt(0.5)).erf() + 1)

    return kernel


def _matmul(how: How, profile: Profile) -> Kernel:
    return lambda left, right: product(left, right, how)


def _linear(how: How, profile: Profile) -> Kernel:
    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = product(x, weight.t(), how)
        return found if bias is None else found + bias

    return kernel


def _addmm(how: How, profile: Profile) -> Kernel:
    def kernel(
        added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        return added * beta + product(left, right, how) * alpha

    return kernel


_KERNELS: dict[str, tuple[str, Callable[[How, Profile], Kernel]]] = {
    "aten.linear.default": ("matmul", _linear),
    "aten.matmul.default": ("matmul", _matmul),
    "aten.mm.default": ("matmul", _matmul),
    "aten.bmm.default": ("matmul", _matmul),
    "aten.addmm.default": ("matmul", _addmm),
    "aten.baddbmm.default": ("matmul", _addmm),
    "aten.sum.default": ("reduction", _sum),
    "aten.sum.dim_IntList": ("reduction", _sum),
    "aten.mean.default": ("reduction", _mean),
    "aten.mean.dim": ("reduction", _mean),
    "aten.rms_norm.default": ("norm", _rms_norm),
    "aten.layer_norm.default": ("norm", _layer_norm),
    "aten.softmax.int": ("softmax", _softmax),
    "aten._softmax.default": ("softmax", _softmax),
    "aten.gelu.default": ("activation", _gelu),
    "aten.scaled_dot_product_attention.default": ("attention", sdpa),
    "enginecast.attention.default": ("attention", attention),
    "enginecast.skip_rms_norm.default": ("skip_norm", _skip_rms_norm),
}
