"""The forms in which one layer can be quantized, fastest first, and what each is expected to gain.

Gains on a CPU were measured on one core (ONNX Runtime 1.31, 128 x 768 x 2048): a static scale for
all of the activations 3.4, one for each row 2.5, a stored weight of 8 or 4 bits in blocks of 32
0.58 and 0.97.  Those of blocks with rounded activations are medians over eight weights and 32 to
512 rows (benchmarks/results/block-products.json); a single row gains three times as much.

On a GPU, which layers gain at all follows torchao's rule, fitted on an H100
(https://github.com/pytorch/ao, torchao/float8/float8_linear_utils.py).  How much they gain is a
curve that crosses 1 near the borders of that rule: good for an order of layers, and replaced by
measured times where there are any.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch.fx import Node

from enginecast.passes.ir.edit import arguments, dtype_of, first_input, shape_of
from enginecast.passes.ir.quantization_plan import Choice, LayerPlan, Scaling
from enginecast.passes.quantize.measure.quantizable import (
    RECURRENT,
    Layer,
    geometry_of,
    recurrence_of,
    transposed_geometry_of,
)
from enginecast.passes.quantize.plan.architectures import CPU, Column, architecture, require
from enginecast.passes.quantize.plan.options import PlanOptions
from enginecast.passes.quantize.plan.scaled_mm_rules import MULTIPLE, off_multiple

BLOCKS = (32, 16)
"""Block sizes to try along K: com.microsoft.MatMulNBits takes powers of two from 16 on."""
NVFP4_BLOCK, MXFP8_BLOCK = 16, 32
TENSORRT_BLOCKS = (64, 128)
"""Sizes that TensorRT documents for blocks of int4."""
COARSE = 128
"""Size of blocks between those and whole rows, where activations are rounded, too."""
SCALED_BY_ROW = frozenset({"sm90"})
"""Architectures on which TensorRT's fp8 products are documented to take a scale for each row of the
weight (release notes of 10.6.0: "on Hopper GPUs")."""
_PEAK, _HALF_N, _HALF_K = 1.8, 1638.0, 819.0
"""Gain of a large product, and the sizes at which half of it is left."""
_COARSE_GAINS = ((1536, 1.25), (768, 1.1), (0, 0.9))
"""Gain of blocks of 128, by the least size along K."""
_CONV_GAIN, _GROUPED_GAIN, _DEPTHWISE_GAIN = 3.0, 1.8, 1.0
"""Medians of chains of such convolutions on one core of an AVX-512 VNNI CPU (ONNX Runtime 1.31).  A
depthwise one gains nothing by itself; between others in int8 it saves the steps to floats and back,
with which the whole took twice as long."""
_LSTM_GAIN = 2.7
"""The same of 64 to 512 units: 1.4 to 3.1."""
_GRU_GAIN = 2.0
_GRU_UNITS, _GRU_UNITS_OF_ROWS, _GRU_ROWS = 512, 256, 8
"""From how many units on a GRU is faster, and with that many rows."""
_SMALL_GRUS = ((128, 0.21), (256, 0.35), (512, 1.04))
"""Below how many units it is how much faster, with one row: of 64, 128 and 256 units."""
_CPU_GAINS: dict[tuple[Choice, Scaling | None, float], float] = {
    ("w8a8-static", "tensor", 1.0): 3.4,
    ("w8a8-dynamic", "row", 1.0): 2.5,
    ("w8a8-dynamic", "block", 1.0): 0.82,
    ("storage", None, 1.0): 0.58,
    ("storage", None, 0.5): 0.97,
}
"""By the last one the bytes of a value."""


def planned(
    layer: Layer,
    choice: Choice,
    weights: Scaling = "row",
    activations: Scaling | None = None,
    **more: Any,
) -> LayerPlan:
    """The decision for a layer; `more` are further fields of it."""
    return LayerPlan(
        module=layer.module,
        source=layer.source,
        ordinal=layer.ordinal,
        kind=layer.kind,
        weight=layer.name,
        shape=layer.shape,
        choice=choice,
        weights=weights,
        activations=activations,
        **more,
    )


def forms(layer: Layer, options: PlanOptions) -> tuple[list[LayerPlan], str]:
    """The forms of a layer, fastest first, without "keep"; and why there is none.

    Raises:
        PassError: the architecture is not known, or lacks what is asked for.
    """
    size = layer.shape[-1]
    block = 0 if options.format == "fp8" or options.on_tensorrt else block_size(size)
    # In blocks where it can be: a row with an outlier channel loses most of itself else.
    stored = planned(layer, "storage", "block" if block else "row", block=block)
    if layer.kind == "embedding":
        if size < MULTIPLE:
            return [], f"rows of {size} values: a scale for each would weigh as much"
        return [stored], ""
    if layer.kind in ("conv", "conv-transpose"):
        return _conv(layer, options)
    if layer.kind in RECURRENT:
        return _recurrence(layer, options)
    if options.mode == "storage":
        few = []
        if options.on_tensorrt:
            four = TENSORRT_BLOCKS[0] if options.format == "int8" else NVFP4_BLOCK
            own = four if options.bits == 4 else options.block
            if own and size % own == 0:
                few = [replace(stored, weights="block", block=own, bits=options.bits)]
            elif own:
                stored = replace(stored, reason=f"K={size} is not whole blocks of {own}")
        elif options.bits == 4 and block:
            few = [replace(stored, bits=4)]  # 4 bits are for blocks
        # Rows in fp8 lose no less than blocks in it.
        found = few if few and options.block else [*few, stored]
        return [_with_gain(f) for f in found] if options.arch == CPU and block else found, ""
    if options.format == "fp8":
        return _fp8(layer, options)
    return _int8(layer, stored, options), ""


def _conv(layer: Layer, options: PlanOptions) -> tuple[list[LayerPlan], str]:
    """A stored weight would keep ONNX Runtime from its blocked layout: such a convolution is slower
    by more than a linear is.
    """
    if options.mode == "storage":
        return [planned(layer, "storage")], ""
    if not multiplies_convs(options):
        return [], "a convolution: products of quantized values are for linears"
    if options.on_tensorrt:
        static = planned(layer, "w8a8-static", "row", "tensor", signed=True)
        return [static, planned(layer, "storage")], ""
    reason = unfit(layer)
    if reason:
        return [], reason
    out, per_group, *_ = layer.shape
    if layer.kind == "conv":
        groups = geometry_of(layer.node).groups
    else:
        groups = transposed_geometry_of(layer.node).groups
    gain = _DEPTHWISE_GAIN if per_group == 1 and out == groups else _GROUPED_GAIN
    gain = _CONV_GAIN if groups == 1 else gain
    form = planned(layer, "w8a8-static", "row", "tensor", bits=_multiplied_bits(options))
    return [replace(form, gain=gain, gain_from="model")], ""


def _multiplied_bits(options: PlanOptions) -> int:
    """Bits of a weight that is multiplied in int8.

    A CPU without VNNI adds two products of uint8 and int8 in 16 bits, where they saturate
    (microsoft/onnxruntime#12088).  Those of two weights that are 128 together fit: 255 * 128 <
    2^15.  GPUs add them in 32 bits.
    """
    return 7 if options.arch == CPU and options.any_cpu else 8


def _recurrence(layer: Layer, options: PlanOptions) -> tuple[list[LayerPlan], str]:
    if options.format == "fp8" or options.on_tensorrt:
        name = "TensorRT's Q/DQ" if options.on_tensorrt else "fp8"
        return [], f"a recurrence: {name} is for linears and convolutions"
    if options.mode == "storage":
        return [planned(layer, "storage")], ""
    name = {"lstm": "an LSTM", "gru": "a GRU", "rnn": "an RNN"}[layer.kind]
    if layer.kind == "rnn" or not multiplies_convs(options):
        which = "LSTMs and large GRUs alone"
        return [], f"{name}: ONNX Runtime's CPU provider alone multiplies in int8, and {which}"
    if recurrence_of(layer.node, arguments(layer.node)[2]).has_projection:
        return [], "an LSTM with a projection: there is none in int8"
    if dtype_of(first_input(layer.node)) != torch.float32:
        return [], f"{name} that does not compute in fp32"
    gain = _LSTM_GAIN if layer.kind == "lstm" else _GRU_GAIN
    if layer.kind == "gru" and (reason := too_small_gru(layer.node)):
        return [], reason
    form = planned(layer, "w8a8-dynamic", "row", "tensor", bits=_multiplied_bits(options))
    return [replace(form, gain=gain, gain_from="model")], ""


def too_small_gru(node: Node) -> str:
    """Why a GRU is not faster in int8 than in fp32; empty: it is."""
    _, rows, units = shape_of(arguments(node)[1])
    least, over = (rows, rows) if isinstance(rows, int) else (1, "any number of")
    if units >= _GRU_UNITS or (units >= _GRU_UNITS_OF_ROWS and least >= _GRU_ROWS):
        return ""
    speed = next(speed for below, speed in _SMALL_GRUS if units < below)
    return (
        f"a GRU of {units} units over {over} rows: {speed} times as fast in int8 as in fp32; "
        f"from {_GRU_UNITS} units on, or {_GRU_UNITS_OF_ROWS} with {_GRU_ROWS} rows, twice"
    )


def multiplies_convs(options: PlanOptions) -> bool:
    """Whether what runs the plan has convolutions in int8 that are faster than those in floats."""
    on_cpu = options.arch == CPU and options.integers
    return (options.format, options.mode) == ("int8", "w8a8") and (on_cpu or options.on_tensorrt)


def unfit(layer: Layer) -> str:
    """Why a convolution has no form in unsigned integers; empty: it has."""
    source, bias = first_input(layer.node), arguments(layer.node)[2:3]
    if dtype_of(source) != torch.float32:
        return "a convolution that does not compute in fp32"
    if len(shape_of(source)) != len(layer.shape):
        return "a convolution of what has no batch: ONNX Runtime has none in int8"
    if bias and isinstance(bias[0], Node) and bias[0] not in layer.constants:
        return "a convolution whose bias is computed"
    if layer.kind == "conv-transpose" and min(transposed_geometry_of(layer.node).padding) < 0:
        return "a transposed convolution whose padding is wider than its kernel"
    return ""


def _int8(layer: Layer, stored: LayerPlan, options: PlanOptions) -> list[LayerPlan]:
    bits = _multiplied_bits(options)
    if options.on_tensorrt:
        return [planned(layer, "w8a8-static", "row", "tensor"), stored]
    if options.static:
        some = [planned(layer, "w8a8-static", "row", "tensor", bits=bits)]
    else:
        # Not one scale for all rows: padding, and the other prompts of a batch, would change a row.
        some = [planned(layer, "w8a8-dynamic", "row", "row", bits=bits)]
    if stored.block:
        # MatMulNBits has 8 bits on every CPU: without VNNI it adds the high bits of weights apart.
        k = layer.shape[-1]
        sizes = (COARSE, stored.block) if k > COARSE and k % COARSE == 0 else (stored.block,)
        some += [planned(layer, "w8a8-dynamic", "block", "block", block=size) for size in sizes]
        some.append(stored)
    return [_with_gain(form) for form in some] if options.arch == CPU else some


def block_size(k: int) -> int:
    """The size of blocks along K that fit into it evenly; 0: none does."""
    return next((size for size in BLOCKS if k % size == 0), 0)


def _fp8(layer: Layer, options: PlanOptions) -> tuple[list[LayerPlan], str]:
    n, k = layer.shape
    form = planned(layer, *native_scales(options))
    reason = off_multiple(n, k)
    if reason:
        return [], reason
    if options.arch == CPU:
        return [form], ""
    gain = modeled_gain(n, k, rowwise=form.activations == "row")
    return [replace(form, gain=gain, gain_from="model")], ""


_BY_ROW: Mapping[str, frozenset[str]] = {"tensorrt": SCALED_BY_ROW, "onnxruntime": frozenset()}
"""Targets with static products of their own -> architectures on which these take a scale for each
row of a weight."""


def native_scales(options: PlanOptions) -> tuple[Choice, Scaling, Scaling]:
    """How an architecture multiplies in fp8 with a target, and what shares a scale in weights and
    activations.

    torch._scaled_mm has one scale for each tensor on both sides or one for each row on both;
    GemmFloat8 has the former alone; TensorRT wants static scales of activations, one for each, and
    takes one for each row of a weight on some.
    One scale for a tensor is static: a dynamic one would let padding, and the other prompts of a
    batch, change a row.

    Raises:
        PassError: the architecture is not known, or has no such products.
    """
    if options.target in _BY_ROW and options.arch != CPU:
        require(options.arch, cast(Column, options.target))
        by_row = options.arch in _BY_ROW[options.target]
        return "w8a8-static", "row" if by_row else "tensor", "tensor"
    if options.static or architecture(options.arch).rowwise.supported == "no":
        require(options.arch, "tensorwise")
        return "w8a8-static", "tensor", "tensor"
    return "w8a8-dynamic", "row", "row"


def _with_gain(form: LayerPlan) -> LayerPlan:
    known = _CPU_GAINS[form.choice, form.activations, form.value_bytes]
    coarse = next(gain for size, gain in _COARSE_GAINS if form.shape[-1] >= size)
    gain = coarse if form.block == COARSE else known
    return replace(form, gain=gain, gain_from="model")


def too_small(n: int, k: int, *, rowwise: bool) -> bool:
    """torchao's rule: whether a native fp8 product of this weight is slower than in bf16."""
    if rowwise:
        return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    return k <= 4096 and n <= 1024


def modeled_gain(n: int, k: int, *, rowwise: bool) -> float:
    """What the curve says, on the side of 1 that the rule says."""
    curve = _PEAK * n / (n + _HALF_N) * k / (k + _HALF_K)
    bounded = min(curve, 0.99) if too_small(n, k, rowwise=rowwise) else max(curve, 1.01)
    return round(bounded, 2)
