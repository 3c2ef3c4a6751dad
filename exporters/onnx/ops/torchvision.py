"""Operators of torchvision: suppression of boxes, and pooling of regions.

torch.onnx's own translations differ from the operators: ONNX puts the corners of a box in order,
where the operator takes a box that ends before it begins for an empty one, and it compares with the
threshold in fp32, which the operator has in fp64.
"""

import operator
from typing import Any

import numpy as np
from onnxscript import opset23 as op
from torch.fx import Node

from enginecast.errors import LoweringError
from enginecast.exporters.onnx.ops.registry import form, refuse
from enginecast.exporters.onnx.ops.values import BOOL, FLOAT, HALVES, INT32, INT64, cast, ints, like

_MOST = (1 << 31) - 1
"""Boxes of a suppression, which has no bound of its own."""


def _in_fp32(x: Any, name: str) -> Any:
    if x.dtype not in (FLOAT, *HALVES):
        raise LoweringError(f"{name} of ONNX Runtime takes fp32, and the program has {x.dtype}")
    return cast(x, FLOAT)


@form("torchvision::nms")
def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Places of the boxes [N, 4] (x1, y1, x2, y2) that are kept, the largest score first, equal
    ones in the order of their places.

    A box without an area, or with a NaN corner, overlaps no other box: it is moved to 0, where its
    area stays 0.
    """
    if not 0 <= iou_threshold <= 1:
        raise LoweringError(
            f"ONNX has no suppression at an overlap of {iou_threshold}: it has to be in 0..1"
        )
    boxes, scores = _in_fp32(boxes, "NonMaxSuppression"), _in_fp32(scores, "NonMaxSuppression")
    starts = op.Slice(boxes, ints(0), ints(2), ints(1))
    ends = op.Slice(boxes, ints(2), ints(4), ints(1))
    larger = op.Cast(op.Greater(ends, starts), to=int(INT32))
    has_area = op.Cast(op.ReduceMin(larger, ints(1), keepdims=1), to=int(BOOL))
    boxes = op.Where(has_area, boxes, like(boxes, 0.0))
    scores = op.Where(op.IsNaN(scores), like(scores, np.inf), scores)  # sorted as the largest
    found = op.NonMaxSuppression(
        op.Unsqueeze(boxes, ints(0)),
        op.Unsqueeze(scores, ints(0, 1)),
        ints(_MOST),
        op.Constant(value_floats=[_below(iou_threshold)]),
    )
    return op.Reshape(op.Slice(found, ints(2), ints(3), ints(1)), ints(-1))


def _below(threshold: float) -> float:
    """The largest fp32 number up to the threshold: an fp32 overlap exceeds both or neither."""
    near = np.float32(threshold)
    return float(near if float(near) <= threshold else np.nextafter(near, np.float32(-np.inf)))


@form("torchvision::roi_align")
def _roi_align(
    input: Any,
    rois: Any,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Any:
    """Regions [K, 5], each with the place of its image first, as [K, C, height, width]."""
    _known(pooled_height, pooled_width)
    images, rois = _in_fp32(input, "RoiAlign"), _in_fp32(rois, "RoiAlign")
    place = op.Cast(op.Slice(rois, ints(0), ints(1), ints(1)), to=int(INT64))
    found = op.RoiAlign(
        images,
        op.Slice(rois, ints(1), ints(5), ints(1)),
        op.Reshape(place, ints(-1)),
        coordinate_transformation_mode="half_pixel" if aligned else "output_half_pixel",
        mode="avg",
        output_height=pooled_height,
        output_width=pooled_width,
        sampling_ratio=max(sampling_ratio, 0),  # 0: as many as fit, which the operator says by less
        spatial_scale=spatial_scale,
    )
    return cast(found, input.dtype)


@form("torchvision::roi_pool")
def _roi_pool(
    input: Any, rois: Any, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Any, Any]:
    """The second result, where each maximum was, is for a backward pass."""
    _known(pooled_height, pooled_width)
    found = op.MaxRoiPool(
        _in_fp32(input, "MaxRoiPool"),
        _in_fp32(rois, "MaxRoiPool"),
        pooled_shape=[pooled_height, pooled_width],
        spatial_scale=spatial_scale,
    )
    found = cast(found, input.dtype)
    return found, found


def _known(*sizes: Any) -> None:
    if not all(isinstance(size, int) for size in sizes):
        raise LoweringError("ONNX pools regions to sizes that are known, and these vary")


def _reads_places(node: Node) -> bool:
    items = [user for user in node.users if user.target is operator.getitem]
    return any(item.args[1] == 1 and item.users for item in items)


refuse(
    "torchvision::roi_pool",
    when=_reads_places,
    reason="it does not say where the maximums were, which the program reads",
)
