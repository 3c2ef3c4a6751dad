"""Quantised operators in an emulated run: what is stored, and the same without its quantisation.

Both halves take one scale, that of what is stored, so that a quantised value and its counterpart
differ by the rounding alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

import enginecast.quantized_ops  # noqa: F401 - registers the operators

own = torch.ops.enginecast

Halves = tuple[Any, Any]
"""What a target stores, and the same in fp32."""


def _scale(low: Sequence[Any], plain: Sequence[Any]) -> Halves:
    scale = own.dynamic_scale.default(*low)
    return scale, scale


def _quantize(low: Sequence[Any], plain: Sequence[Any]) -> Halves:
    return own.quantize.default(*low), plain[0].float() / low[1]


def _quantize_blocks(low: Sequence[Any], plain: Sequence[Any]) -> Halves:
    weight, scale = plain[0].float(), low[1]
    blocks = weight.unflatten(1, (scale.shape[1], -1)) / scale.unsqueeze(-1)
    return own.quantize_blocks.default(*low), blocks.flatten(1)


def _dequantize(low: Sequence[Any], plain: Sequence[Any]) -> Halves:
    return own.dequantize.default(*low), plain[0] * low[1]


def _linear(low: Sequence[Any], plain: Sequence[Any]) -> Halves:
    x, _, weight, _, bias, _ = plain
    product = torch.nn.functional.linear(x, weight) * low[1] * low[3].reshape(-1)
    return own.quantized_linear.default(*low), product if bias is None else product + bias


def _blockwise(low: Sequence[Any], plain: Sequence[Any]) -> Halves:
    x, weight, _, bias = plain[:4]
    scale = low[2]
    wide = (weight.float().unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)).flatten(1)
    return own.blockwise_linear.default(*low), torch.nn.functional.linear(x, wide, bias)


_OPS: dict[Any, Callable[[Sequence[Any], Sequence[Any]], Halves]] = {
    own.dynamic_scale.default: _scale,
    own.quantize.default: _quantize,
    own.quantize_blocks.default: _quantize_blocks,
    own.dequantize.default: _dequantize,
    own.quantized_linear.default: _linear,
    own.blockwise_linear.default: _blockwise,
}


_SCALED = frozenset({own.dynamic_scale.default, own.quantize.default, own.quantize_blocks.default})


def is_quantized(node: Node) -> bool:
    """Whether a node is one of our operators for quantised values."""
    return node.target in _OPS


def is_scaled(node: Node) -> bool:
    """Whether its value fills the range of its dtype by construction: there is no headroom to
    measure.
    """
    return node.target in _SCALED


def halves(node: Node, low: Sequence[Any], plain: Sequence[Any]) -> Halves:
    """The value of a node from both halves of its arguments.

    Args:
        node: for which `is_quantized` holds.
        low: arguments as a target stores them.
        plain: the same in fp32; quantised ones are values over their scale, not rounded.
    """
    return _OPS[node.target](low, [t.float() if _is_half(t) else t for t in plain])


def _is_half(found: Any) -> bool:
    return isinstance(found, Tensor) and found.dtype in (torch.float16, torch.bfloat16)
