"""Resizes by a factor, where a size stays what it was all the same.

Two pixels times 1.3 are two pixels.  ONNX Runtime (1.31) copies its input where no size changes;
torch does so along each dimension, and not in all of its kernels: in one dimension "nearest" gives
the first pixel twice.
"""

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops import nn as torch_nn

from enginecast.exporters.onnx.ops.registry import form
from enginecast.exporters.onnx.ops.values import FLOAT, INT64, REALS, ints
from enginecast.passes.ir.effects import aten

Scales = Sequence[float] | None

NEAREST = {
    "mode": "nearest",
    "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
}


@form(aten.upsample_nearest1d.vec, aten.upsample_nearest3d.vec)
def _nearest(x: Any, output_size: Any, scale_factors: Scales) -> Any:
    if scale_factors is None or not _may_stay(scale_factors):
        return torch_nn.aten_upsample_nearestnd_vec(x, output_size, scale_factors)
    return _continued(x, scale_factors, NEAREST)


@form(aten.upsample_nearest2d.vec)
def _nearest2d(x: Any, output_size: Any, scale_factors: Scales) -> Any:
    """A size that is doubled is, whatever the factor says."""
    if scale_factors is None or not any(1 < s < 3 and s != 2 for s in scale_factors):
        return torch_nn.aten_upsample_nearestnd_vec(x, output_size, scale_factors)
    return _by_sizes(x, scale_factors, (1, 2), NEAREST)


@form(aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec)
def _linear(x: Any, output_size: Any, align_corners: bool, scale_factors: Scales) -> Any:
    _refuse_bytes(x)
    how = torch_nn._get_upsample_align_corners_mode(align_corners)
    if scale_factors is None:
        return torch_nn._aten_upsample_output_size(x, output_size, "linear", how)
    if align_corners or not any(1 < scale < 2 for scale in scale_factors):
        return torch_nn._aten_upsample_scales(x, scale_factors, "linear", how)
    named = {"mode": "linear", "coordinate_transformation_mode": how}
    return _by_sizes(x, scale_factors, (1,), named)


@form(aten._upsample_bilinear2d_aa.default)
def _linear_without_aliases(x: Any, output_size: Any, align_corners: bool, *scales: Any) -> Any:
    _refuse_bytes(x)
    _refuse_aligned(align_corners)
    return torch_nn.aten__upsample_bilinear2d_aa(x, output_size, align_corners)


@form(aten._upsample_bicubic2d_aa.default)
def _cubic_without_aliases(x: Any, output_size: Any, align_corners: bool, *scales: Any) -> Any:
    _refuse_bytes(x)
    _refuse_aligned(align_corners)
    return torch_nn.aten__upsample_bicubic2d_aa(x, output_size, align_corners)


def _refuse_bytes(x: Any) -> None:
    if x.dtype not in REALS:
        raise ValueError("torch interpolates bytes in fixed-point arithmetic, which ONNX has not")


def _refuse_aligned(align_corners: bool) -> None:
    if align_corners:
        raise ValueError("ONNX has no antialiased resize with aligned corners")


@form(aten.upsample_bicubic2d.vec)
def _bicubic(x: Any, output_size: Any, align_corners: bool, scale_factors: Scales) -> Any:
    _refuse_bytes(x)
    # Where corners are aligned, the factor only says how large the result is.
    if scale_factors is None or align_corners or not _may_stay(scale_factors):
        return torch_nn.aten_upsample_bicubic2d_vec(x, output_size, align_corners, scale_factors)
    named = {
        "mode": "cubic",
        "coordinate_transformation_mode": "half_pixel",
        "cubic_coeff_a": -0.75,
    }
    return _continued(x, scale_factors, named)


def _may_stay(scales: Sequence[float]) -> bool:
    """Whether all sizes may stay as they are, and the input would be copied."""
    return any(1 < scale < 2 for scale in scales) and all(1 <= scale < 2 for scale in scales)


def _continued(x: Any, scales: Sequence[float], named: dict[str, Any]) -> Any:
    """A resize of the input, continued by its last pixel until a size changes: what is read for
    the first pixels does not depend on what follows.
    """
    axes = range(2, 2 + len(scales))
    most = [math.ceil(1 / (scale - 1)) if scale > 1 else 0 for scale in scales]
    nothing = [0] * len(scales)
    longer = op.Pad(x, ints(*nothing, *most), None, ints(*axes), mode="edge")
    factors = op.Constant(value=ir.tensor([1, 1, *scales], FLOAT))
    found = op.Resize(longer, None, factors, None, **named)
    _, ends = _sizes(x, scales)
    return op.Slice(found, ints(*nothing), ends, ints(*axes))


def _by_sizes(x: Any, scales: Sequence[float], exact: Sequence[int], named: dict[str, Any]) -> Any:
    """A resize with one of the `exact` factors along each dimension that it fits."""
    before, after = _sizes(x, scales)
    factors = op.Constant(value=ir.tensor(scales, FLOAT))
    for factor in exact:
        fits = op.Equal(after, op.Mul(before, ints(factor)))
        factors = op.Where(fits, op.Constant(value_floats=[float(factor)]), factors)
    factors = op.Concat(op.Constant(value_floats=[1.0, 1.0]), factors, axis=0)
    return op.Resize(x, None, factors, None, **named)


def _sizes(x: Any, scales: Sequence[float]) -> tuple[Any, Any]:
    """The sizes of what is resized, and those of the result, as torch counts them."""
    before = op.Shape(x, start=2)
    factors = op.Constant(value=ir.tensor(scales, ir.DataType.DOUBLE))
    product = op.Mul(op.Cast(before, to=int(ir.DataType.DOUBLE)), factors)
    return before, op.Cast(op.Floor(product), to=int(INT64))
