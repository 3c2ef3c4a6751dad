"""The operators of object detection: torchvision's, or the same by their definitions, where that
package is not installed.
"""

import importlib
import importlib.util
import math
import warnings

import torch
from torch import Tensor

IS_REAL = importlib.util.find_spec("torchvision") is not None
"""Whether the operators are torchvision's."""
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height,"
    " SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height,"
    " SymInt pooled_width) -> (Tensor, Tensor)",
)


def _nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    areas = (dets[:, 2] - dets[:, 0]) * (dets[:, 3] - dets[:, 1])
    kept: list[int] = []
    order = scores.sort(descending=True, stable=True).indices.tolist()
    gone: set[int] = set()
    for place, first in enumerate(order):
        if first in gone:
            continue
        kept.append(first)
        for other in order[place + 1 :]:
            low = [max(float(dets[first, i]), float(dets[other, i])) for i in (0, 1)]
            high = [min(float(dets[first, i]), float(dets[other, i])) for i in (2, 3)]
            sides = [torch.tensor(max(0.0, b - a)) for a, b in zip(low, high, strict=True)]
            common = sides[0] * sides[1]
            if float(common / (areas[first] + areas[other] - common)) > iou_threshold:
                gone.add(other)
    return torch.tensor(kept, dtype=torch.int64)


def _fake_nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """As torchvision says it, by torch's older function: two boxes or more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = torch.library.get_ctx().create_unbacked_symint()
    return dets.new_empty(count, dtype=torch.int64)


def _sample(image: Tensor, y: float, x: float) -> Tensor:
    """Bilinear; an image is [C, H, W]."""
    height, width = image.shape[1:]
    if y < -1 or y > height or x < -1 or x > width:
        return image.new_zeros(image.shape[0])
    y, x = max(y, 0.0), max(x, 0.0)
    top, left = min(int(y), height - 1), min(int(x), width - 1)
    below, right = min(top + 1, height - 1), min(left + 1, width - 1)
    y, x = (float(top) if top == below else y), (float(left) if left == right else x)
    down, across = y - top, x - left
    return (
        image[:, top, left] * (1 - down) * (1 - across)
        + image[:, top, right] * (1 - down) * across
        + image[:, below, left] * down * (1 - across)
        + image[:, below, right] * down * across
    )


def _roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    found = input.new_zeros(len(rois), input.shape[1], pooled_height, pooled_width)
    for number, (place, *corners) in enumerate(rois.tolist()):
        left, top, right, bottom = (c * spatial_scale - (0.5 if aligned else 0) for c in corners)
        sides = [bottom - top, right - left]
        if not aligned:
            sides = [max(side, 1.0) for side in sides]
        bins = [sides[0] / pooled_height, sides[1] / pooled_width]
        counts = [sampling_ratio if sampling_ratio > 0 else math.ceil(size) for size in bins]
        for row in range(pooled_height):
            for column in range(pooled_width):
                total = input.new_zeros(input.shape[1])
                for i in range(counts[0]):
                    for j in range(counts[1]):
                        y = top + bins[0] * (row + (i + 0.5) / counts[0])
                        x = left + bins[1] * (column + (j + 0.5) / counts[1])
                        total = total + _sample(input[int(place)], y, x)
                found[number, :, row, column] = total / max(counts[0] * counts[1], 1)
    return found


def _fake_roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    return input.new_empty(rois.shape[0], input.shape[1], pooled_height, pooled_width)


def _round(value: float) -> int:
    """Half away from zero, as C does."""
    return math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5)


def _roi_pool(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Tensor, Tensor]:
    height, width = input.shape[2:]
    found = input.new_zeros(len(rois), input.shape[1], pooled_height, pooled_width)
    for number, (place, *corners) in enumerate(rois.tolist()):
        left, top, right, bottom = (_round(c * spatial_scale) for c in corners)
        bins = [max(bottom - top + 1, 1) / pooled_height, max(right - left + 1, 1) / pooled_width]
        for row in range(pooled_height):
            for column in range(pooled_width):
                rows = [math.floor(row * bins[0]) + top, math.ceil((row + 1) * bins[0]) + top]
                columns = [math.floor(column * bins[1]) + left]
                columns += [math.ceil((column + 1) * bins[1]) + left]
                rows = [min(max(each, 0), height) for each in rows]
                columns = [min(max(each, 0), width) for each in columns]
                part = input[int(place), :, slice(*rows), slice(*columns)]
                if part.numel():
                    found[number, :, row, column] = part.amax((1, 2))
    return found, torch.zeros_like(found, dtype=torch.int32)


def _fake_roi_pool(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Tensor, Tensor]:
    shape = (rois.shape[0], input.shape[1], pooled_height, pooled_width)
    return input.new_empty(shape), input.new_empty(shape, dtype=torch.int32)


if IS_REAL:
    importlib.import_module("torchvision")  # registers them
else:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for _schema in _SCHEMAS:
        LIBRARY.define(_schema)
    for _name, _kernel, _fake in (
        ("nms", _nms, _fake_nms),
        ("roi_align", _roi_align, _fake_roi_align),
        ("roi_pool", _roi_pool, _fake_roi_pool),
    ):
        LIBRARY.impl(_name, _kernel, "CPU")
        torch.library.register_fake(f"torchvision::{_name}", _fake, lib=LIBRARY)
