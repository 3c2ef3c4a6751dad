"""Scales that a checkpoint has beside weights in fp8, and whether they still hold these weights."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.passes.ir.edit import weight_value
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.match import behind_casts
from enginecast.passes.quantize.measure.quantizable import Layer


def given_scale(
    program: ExportedProgram, layer: Layer, scales: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor | None:
    """The scale with which a dtype holds a layer's weight bit for bit, from that of its parameter.

    Passes may have scaled the weight by a power of two.

    Args:
        scales: by the names of parameters: fp32, [] or [N, 1].

    Returns:
        fp32, [] or [N, 1]; None: none is given, or it does not hold the weight.
    """
    if layer.name not in scales:
        return None
    weight = leaf = behind_casts(layer.weight)
    while leaf.op != "placeholder":
        leaf = leaf.all_input_nodes[0]
    values, stored = (weight_value(program, each).float() for each in (weight, leaf))
    scale = scales[layer.name] * (values.abs().amax() / stored.abs().amax())
    quantized = own.quantize.default(values, scale, dtype)
    is_held = torch.equal(own.dequantize.default(quantized, scale, torch.float32), values)
    return scale if is_held else None
