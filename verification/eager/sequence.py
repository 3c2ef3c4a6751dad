"""Compute sums in the order of kernels: one number after another, in a few partial sums.

torch adds in pairs, and is off by a few unit roundoffs however long a sum is. Most kernels add in
sequence: where they sum along memory, in as many partial sums as a vector has lanes, else in one
for each result. That is as correct, and its error grows with the length of the sum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from enginecast.library_names import aten, private_or_none

LANES = (8, 4)
"""Numbers of partial sums: of ONNX Runtime's reductions and of its poolings, in fp32 on x86."""


def in_sequence(lanes: int) -> AbstractContextManager[Any]:
    """Within the block, torch's sums in fp32 are computed in sequence.

    Args:
        lanes: number of partial sums where the last axis is summed over.
    """
    return _InSequence(lanes)


class _InSequence(TorchDispatchMode):
    def __init__(self, lanes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lanes = lanes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_fp32 = bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float32
        if is_fp32 and kwargs.get("dtype") in (None, torch.float32):
            if func in _RULES:
                return _RULES[func](self._lanes, *args, **kwargs)
            if func in _SUMMING:
                with self:
                    return _SUMMING[func](*args, **kwargs)
        return func(*args, **kwargs)


def _sum(
    lanes: int, x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any
) -> Tensor:
    axes = sorted(axis % x.ndim for axis in dim) if dim and x.ndim else list(range(x.ndim))
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    shape = [1 if axis in axes else x.shape[axis] for axis in range(x.ndim)]
    result = shape if keepdim else [x.shape[axis] for axis in kept]
    if not x.numel():
        return torch.zeros(result)
    last = max((axis for axis in range(x.ndim) if x.shape[axis] > 1), default=0)
    lanes = lanes if last in axes or not x.ndim else 1
    terms = x.permute((*axes, *kept)).reshape(math.prod(x.shape[axis] for axis in axes), -1)
    padded = torch.nn.functional.pad(terms, (0, 0, 0, -len(terms) % lanes))
    partial = _added(padded.reshape(-1, lanes * terms.shape[1]).numpy())
    return torch.from_numpy(_added(partial.reshape(lanes, -1))).reshape(result)


def _added(rows: Any) -> Any:
    """The sum of some rows, one after another."""
    if rows.shape[1] > 1:
        return np.add.reduce(rows, axis=0)
    return np.add.accumulate(rows[:, 0])[-1:]  # numpy would add a single column in pairs


def _mean(
    lanes: int, x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any
) -> Tensor:
    total = _sum(lanes, x, dim, keepdim)
    return total / (x.numel() / max(total.numel(), 1))


def _cumsum(_: int, x: Tensor, dim: int, **__: Any) -> Tensor:
    return torch.from_numpy(np.add.accumulate(x.numpy(), axis=dim)) if x.ndim else x.clone()


_RULES: Mapping[Any, Callable[..., Tensor]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.cumsum.default: _cumsum,
}


def _var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    axes = list(dim) if dim else list(range(x.ndim))
    mean = x.mean(axes, keepdim=True)
    squares = (x - mean).square().sum(axes, keepdim=keepdim)
    free = x.numel() / max(squares.numel(), 1) - (1 if correction is None else correction)
    return squares / max(free, 0), mean if keepdim else mean.reshape(squares.shape)


def _std(x: Tensor, dim: Any = None, **options: Any) -> Tensor:
    return _var(x, dim, **options).sqrt()


def _std_mean(x: Tensor, dim: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x, dim, **options)
    return var.sqrt(), mean


def _norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    axes = list(range(x.ndim)) if dim is None else dim
    if ord == 1:
        return x.abs().sum(axes, keepdim=keepdim)
    if ord == 2:
        return x.square().sum(axes, keepdim=keepdim).sqrt()
    found: Tensor = torch.linalg.vector_norm(x.double(), ord, dim, keepdim).float()
    return found


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    axes = range(x.ndim - len(shape), x.ndim)
    var, mean = _var_mean(x, axes, correction=0, keepdim=True)
    scale = (var + eps).rsqrt()
    found = (x - mean) * scale
    found = found if weight is None else found * weight
    return found if bias is None else found + bias, mean, scale


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels, _, groups, eps = sizes
    found, mean, scale = _layer_norm(x.reshape(batch, groups, -1), (0,), None, None, eps)
    found, each = found.reshape(x.shape), (channels, *[1] * (x.ndim - 2))
    found = found if weight is None else found * weight.reshape(each)
    return found if bias is None else found + bias.reshape(each), mean, scale


_DECOMPOSITIONS = private_or_none("torch._decomp.decomposition_table") or {}
_SUMMING: Mapping[Any, Callable[..., Any]] = {
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten.var_mean.correction: _var_mean,
    aten.std_mean.correction: _std_mean,
    aten.linalg_vector_norm.default: _norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    **{
        op: _DECOMPOSITIONS[op]
        for op in (
            *(aten.logsumexp.default, aten.mse_loss.default, aten.smooth_l1_loss.default),
            *(aten.huber_loss.default, aten.binary_cross_entropy.default, aten.nansum.default),
            *(aten.binary_cross_entropy_with_logits.default, aten.soft_margin_loss.default),
            *(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
            *(aten.native_batch_norm.default, aten._native_batch_norm_legit.no_stats),
        )
        if op in _DECOMPOSITIONS
    },
}
"""Ops that consist of sums, as torch or we spell them out."""
