"""Images and videos: `pixel_values`, `pixel_values_videos` and their masks."""

from collections.abc import Mapping
from itertools import chain

import torch
from transformers import PreTrainedConfig

from enginecast.capture.inputs.derive.model_facts import ModelFacts, number_of
from enginecast.capture.inputs.derive.text import batch
from enginecast.capture.inputs.specs import DimSpec, InputSpec, Kind

SIDES = ("image_size", "img_size", "crop_size", "input_size", "max_img_size")
CHANNELS = ("num_channels", "in_channels", "in_chans", "input_channels", "image_channels")
FRAMES = ("num_frames", "frames_per_clip")
PARTS = ("vision_config", "image_config", "video_config", "backbone_config", "encoder")
"""Where the image side of a config of several parts is; searched before the others."""

SIDE_WITHOUT_LIMIT = 224
SMALLEST_SIDE = 64
LARGEST_SIDE = 2048
"""Sides of images where the config gives none: convolutions take any.  Five of them with a stride
of two leave two pixels of the smallest; of one, torch.export makes a constant."""

PACKED = ("grid_thw", "image_grid_thw", "spatial_shapes", "pixel_position_ids", "target_sizes")
"""Arguments of models that take images cut into patches, whose number each image decides."""


def pixel_values(facts: ModelFacts) -> InputSpec | None:
    """`pixel_values` [batch, channels, height, width]; [batch, frames, ...] of a video model."""
    if any(name in facts.arguments for name in PACKED):
        return None
    frames = number_of(_vision(facts), *FRAMES)
    return _pixels(facts, "pixel_values", () if frames is None else (frames,))


def pixel_values_videos(facts: ModelFacts) -> InputSpec | None:
    """`pixel_values_videos` [batch, frames, channels, height, width]."""
    frames = facts.number(*FRAMES)
    if frames is None or any(name in facts.arguments for name in PACKED):
        return None
    return _pixels(facts, "pixel_values_videos", (frames,))


def pixel_mask(facts: ModelFacts) -> InputSpec | None:
    """`pixel_mask` [batch, height, width] of ones: all of an image is valid."""
    pixels = pixel_values(facts)
    if pixels is None or len(pixels.dims) != 4:
        return None
    first, _, height, width = pixels.dims
    return InputSpec("pixel_mask", "tensor", torch.int64, (first, height, width), 1, 1)


def _pixels(facts: ModelFacts, name: str, frames: tuple[int, ...]) -> InputSpec:
    vision = _vision(facts)
    channels = number_of(vision, *CHANNELS) or facts.number(*CHANNELS) or 3
    static = tuple(DimSpec.static(size) for size in (*frames, channels))
    kind: Kind = "tensor" if frames else "image"
    sides = _sides(vision)
    if sides is not None:
        image = tuple(map(DimSpec.static, sides))
    elif frames:
        image = (DimSpec.static(SIDE_WITHOUT_LIMIT),) * 2
    else:
        image = tuple(
            DimSpec(axis, SIDE_WITHOUT_LIMIT, SMALLEST_SIDE, LARGEST_SIDE)
            for axis in ("height", "width")
        )
    return InputSpec(name, kind, torch.float32, (batch(), *static, *image))


def _vision(facts: ModelFacts) -> PreTrainedConfig:
    """The part of the config that knows the size of images, else the one named for them."""
    own = [getattr(facts.config, name, None) for name in PARTS]
    named = [part for part in own if isinstance(part, PreTrainedConfig)]
    candidates = [*chain([facts.config], named, facts.parts)]
    sized = (part for part in candidates if _sides(part) is not None)
    return next(sized, named[0] if named else facts.config)


def _sides(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Height and width of an image, from a number, a pair, or `{"height": .., "width": ..}`."""
    for name in SIDES:
        size = getattr(config, name, None)
        if isinstance(size, Mapping):
            size = (size.get("height"), size.get("width"))
        pair = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        if len(pair) == 2 and all(isinstance(side, int) and side > 0 for side in pair):
            height, width = pair
            return height, width
    return None


VISION_INPUTS = {
    "pixel_values": pixel_values,
    "pixel_values_videos": pixel_values_videos,
    "pixel_mask": pixel_mask,
}
