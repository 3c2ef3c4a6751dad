"""Emulate a target's kernels: rounding to a storage dtype, composite kernels that round in between
if a profile says so, and quantized operators.

The kernels take and return tensors of the storage dtype. torch's elementwise ops on the CPU compute
one op in fp32 and round it, so a kernel whose every step is rounded is written as plain torch; sums
are written out, since torch keeps its own in fp32.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from enginecast.library_names import aten
from enginecast.ops.rules import Rules
from enginecast.verification.emulate.profiles import Profile

own = torch.ops.enginecast

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LOW = frozenset({torch.float16, torch.bfloat16, *FP8})
"""Storage dtypes that are emulated."""


def is_low(found: Any) -> bool:
    """Whether it is a tensor of a storage dtype."""
    return isinstance(found, Tensor) and found.dtype in LOW


def widened(found: Any) -> Any:
    """In fp32 where it is of a storage dtype."""
    return found.float() if is_low(found) else found


def round_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even, as hardware stores it.

    fp16, bf16 and e5m2 overflow to infinity.  e4m3fn saturates: it has no infinity, and whether a
    cast saturates or gives NaN changed between torch 2.12 and 2.13, so the clamp is explicit.
    """
    if dtype is torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        tensor = tensor.clamp(-limit, limit)
    return tensor.to(dtype)


Kernel = Callable[..., Any]
KERNELS: Rules[tuple[str, Kernel]] = Rules()
"""Op -> which rule of a profile it goes by, and its kernel."""
KERNELS.refuse(
    *(own.whole_rms_norm.default, own.skip_rms_norm.default),
    reason="it computes in fp32, and rounds once",
)


def _kernel(kind: str, *ops: Any) -> Callable[[Kernel], Kernel]:
    """Register the decorated kernel for these ops."""

    def register(kernel: Kernel) -> Kernel:
        KERNELS.rule(*ops)((kind, kernel))
        return kernel

    return register


def kernel_of(node: Node, profile: Profile) -> Kernel | None:
    """The kernel that rounds on the way where the profile has one; None: fp32 inside."""
    kind, kernel = KERNELS.get(node.target, ("", None))
    return None if kernel is None or getattr(profile, kind).how == "fp32" else kernel


@_kernel("activation", aten.gelu.default)
def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (inner.tanh() + 1)
    return x * 0.5 * ((x * math.sqrt(0.5)).erf() + 1)


@_kernel("attention", aten.scaled_dot_product_attention.default)
def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """aten.scaled_dot_product_attention."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attend(query, key, value, attn_mask, scale, is_causal)


@_kernel("attention", own.attention.default)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """enginecast.attention."""
    first, second, third = (
        x if x.dim() == 4 else x.unflatten(-1, (count, -1)).transpose(1, 2)
        for x, count in ((query, heads), (key, kv_heads), (value, kv_heads))
    )
    found = _attend(first, second, third, bias, scale, causal)
    return (found if query.dim() == 4 else found.transpose(1, 2).flatten(2)).contiguous()


@_kernel("attention", own.cached_attention.default)
def _cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """enginecast.cached_attention."""
    keys, values = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    return _attend(query, keys, values, bias, scale, False).contiguous(), keys, values


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attention whose scores and weights are stored.

    Args:
        query: [..., heads, tokens, size].
        key: with as many heads or fewer, which are repeated; so are those of value.
    """
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if groups > 1:
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    dtype = query.dtype
    # The scale is the product's alpha.
    scores = (query.float() @ key.float().mT * scale).to(dtype).float()
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if bias is not None:
        is_bool = bias.dtype is torch.bool
        scores = scores.masked_fill(~bias, -torch.inf) if is_bool else scores + bias
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    # A row that may attend to nothing has weights of zero, as torch's attention has.
    weights = scores.softmax(-1).masked_fill(nothing, 0.0).to(dtype)
    return (weights.float() @ value.float()).to(dtype)


class Twin:
    """A value of a low dtype (or computed from one), and the same in fp32."""

    __slots__ = ("_plain", "_wide", "low")

    def __init__(self, low: Any, plain: Any = None) -> None:
        self.low = low
        self._plain = plain
        self._wide: Any = None

    @property
    def exact(self) -> bool:
        """Whether nothing was rounded yet: fp32 has the same values."""
        return self._plain is None

    @property
    def wide(self) -> Any:
        """What is stored, as fp32 for computing; kept as long as the value."""
        if self._wide is None:
            self._wide = map_aggregate(self.low, widened)
        return self._wide

    @property
    def plain(self) -> Any:
        return self.wide if self._plain is None else self._plain


QUANTIZED: Rules[Callable[[Any, Sequence[Any], Sequence[Any]], Twin]] = Rules()
"""Op -> its value from both halves of its arguments."""


@QUANTIZED.rule(own.quantize.default, own.dequantize.default, own.quantized_linear.default)
@QUANTIZED.rule(own.quantize_affine.default, own.dequantize_affine.default)
@QUANTIZED.rule(own.quantized_conv.default, own.quantized_add.default, own.quantized_lstm.default)
@QUANTIZED.rule(own.quantized_gru.default)
@QUANTIZED.rule(own.dequantize_axis.default, own.integer_linear.default, own.fp8_gemm.default)
@QUANTIZED.rule(own.dequantize_blocks.default, own.dequantize_mx.default)
def _of_floats(op: Any, low: Sequence[Any], plain: Sequence[Any]) -> Twin:
    """Of values that were not rounded, an op gives what is not rounded."""
    given = [
        stored if argument.name.endswith("scale") else wide
        for argument, stored, wide in zip(op._schema.arguments, low, plain, strict=True)
    ]
    return Twin(op(*low), op(*(torch.float32 if isinstance(x, torch.dtype) else x for x in given)))


@QUANTIZED.rule(own.dynamic_scale.default, own.power_of_two.default)
def _dynamic_scale(op: Any, low: Sequence[Any], plain: Sequence[Any]) -> Twin:
    scale = op(*low)
    return Twin(scale, scale)


@QUANTIZED.rule(own.quantize_unsigned.default, own.quantize_linear.default)
def _quantize_unsigned(op: Any, low: Sequence[Any], plain: Sequence[Any]) -> Twin:
    return Twin(op(*low), plain[0].float() / low[1])


@QUANTIZED.rule(own.quantize_blocks.default)
def _quantize_in_blocks(op: Any, low: Sequence[Any], plain: Sequence[Any]) -> Twin:
    weight, scale = plain[0].float(), low[1]
    blocks = weight.unflatten(1, (scale.shape[1], -1)) / scale.unsqueeze(-1)
    return Twin(op(*low), blocks.flatten(1))


@QUANTIZED.rule(own.pack_blocks.default, own.values_of_bytes.default, aten.view.dtype)
def _unpacked(op: Any, low: Sequence[Any], plain: Sequence[Any]) -> Twin:
    return Twin(op(*low), plain[0])


@QUANTIZED.rule(aten._int_mm.default)
def _int_mm(op: Any, low: Sequence[Any], plain: Sequence[Any]) -> Twin:
    return Twin(op(*low), plain[0].float() @ plain[1].float())


@QUANTIZED.rule(aten._scaled_mm.default)
def _scaled_mm(op: Any, low: Sequence[Any], plain: Sequence[Any]) -> Twin:
    product, bias = plain[0] @ plain[1] * low[2] * low[3], plain[4]
    return Twin(op(*low), product if bias is None else product + bias)


@QUANTIZED.rule(own.blockwise_linear.default, own.packed_linear.default)
def _blockwise(op: Any, low: Sequence[Any], plain: Sequence[Any]) -> Twin:
    x, weight, _, bias = plain[:4]
    scale = low[2].float()
    wide = (weight.float().unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)).flatten(1)
    return Twin(op(*low), torch.nn.functional.linear(x, wide, bias))


def quantized(node: Node, low: Sequence[Any], plain: Sequence[Any]) -> Twin:
    """The value of a node that has a rule in `QUANTIZED`, from both halves of its arguments.

    Both take one scale, that of what is stored, so that a quantized value and its counterpart
    differ by the rounding alone.

    Args:
        low: arguments as a target stores them.
        plain: the same in fp32; quantized ones are values over their scale, not rounded.
    """
    halves = (torch.float16, torch.bfloat16)
    wide = [t.float() if isinstance(t, Tensor) and t.dtype in halves else t for t in plain]
    return QUANTIZED[node.target](node.target, low, wide)
