"""Inputs that a config describes: text, images and videos, audio, and time series."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import torch
from transformers import PreTrainedConfig

from enginecast.capture.inputs.derive.model_facts import GRIDS, ModelFacts, numbers_of
from enginecast.capture.inputs.specs import (
    BATCH,
    BOXES,
    LARGEST_BATCH,
    SEQUENCE,
    DimSpec,
    InputSpec,
    Kind,
)
from enginecast.capture.inputs.text_config import (
    decoder_of,
    ending_of,
    longest_sequence,
    longest_target,
    number_of,
    padding_of,
    sequence_step,
    text_of,
)

Derive = Callable[[ModelFacts], InputSpec | None]

TARGET = "target_sequence"
GROUPED = re.compile(r"\(batch_size \* (?P<count>\w+),")
VOCABULARIES = ("src_vocab_size", "vocab_size", "text_vocab_size", "text_encoder_vocab_size")
TARGET_VOCABULARIES = ("tgt_vocab_size", "decoder_vocab_size", "vocab_size")
TYPES_WITHOUT_TABLE = 4
"""XLNet's tokenizer gives the most: of two texts, of what ends them, and of padding."""
CODE_POINTS = 0x110000
"""Ids of models that hash the characters of a text: all of Unicode."""

SIDES = ("image_size", "img_size", "crop_size", "input_size", "max_img_size")
CHANNELS = ("num_channels", "in_channels", "in_chans", "input_channels", "image_channels")
FRAME_COUNTS = ("num_frames", "frames_per_clip")
PARTS = ("vision_config", "image_config", "video_config", "backbone_config", "encoder")
"""Where the image side of a config of several parts is; searched before the others."""

SIDE_WITHOUT_LIMIT = 224
SMALLEST_SIDE = 64
LARGEST_SIDE = 2048
"""Sides of images where the config gives none: convolutions take any.  Five of them with a stride
of two leave two pixels of the smallest; of one, torch.export makes a constant."""

PACKED = ("grid_thw", "image_grid_thw", "spatial_shapes", "pixel_position_ids", "target_sizes")
"""Arguments of models that take images cut into patches, whose number each image decides."""

PATCHES = 16
"""Rows and columns of patches where the config gives no size."""

MEL_BINS = ("num_mel_bins", "n_mels", "input_feat_size")
FEATURES = ("input_feat_per_channel", "feature_projection_input_dim")
"""Width of a frame in configs of models that take [batch, frames, features]."""

FRAMES_WITHOUT_LIMIT = 1024
FEWEST_FRAMES = 32
"""Convolutions over frames halve them up to four times."""

FEWEST_STEPS = 8
"""Frames that the shortest waveform gives: a few, so that the position convolution sees some."""
LONGEST_STEPS = 512
LENGTHS = ("sequence_length", "seq_len", "num_frames", "frames")
"""Sizes in documented shapes that each call decides."""
ROWS_WITHOUT_LIMIT = 512
SECOND = 16000
"""Samples, where the config gives neither a rate nor convolutions."""


def batch() -> DimSpec:
    """The first dimension of every derived input."""
    return DimSpec(BATCH, 3, 1, LARGEST_BATCH)


def rows_of(facts: ModelFacts, name: str) -> DimSpec:
    """The first dimension of a text's ids: whole groups of rows where `forward` documents
    (batch_size * num_codebooks, ..), as models of sound do that take a row for each codebook."""
    group = GROUPED.search(facts.shapes.get(name, ""))
    count = facts.number(group["count"]) if group else None
    if count is None:
        return batch()
    return DimSpec(BATCH, 2 * count, count, LARGEST_BATCH // count * count, step=count)


def sequence(config: PreTrainedConfig) -> DimSpec:
    """The dimension of a text's tokens.

    Models that work in blocks pad a text up to the next one, which is another program for each
    remainder; such a sequence is of one block, and static.
    """
    longest = longest_sequence(config, 7)
    step = sequence_step(config)
    if step > 1:
        return DimSpec.static(min(step, longest))
    return DimSpec(SEQUENCE, min(7, longest), 1, longest)


def largest_id(config: PreTrainedConfig) -> int | None:
    """The last id of the vocabulary that texts are written in."""
    text = text_of(config)
    size = number_of(text, *VOCABULARIES) or number_of(config, *VOCABULARIES)
    if size is None and number_of(text, "num_hash_buckets") is not None:
        size = CODE_POINTS
    return None if size is None else size - 1


def token_ids(facts: ModelFacts) -> InputSpec | None:
    """`input_ids` [batch, sequence]."""
    high = largest_id(facts.config)
    if high is None:
        return None
    return InputSpec(
        "input_ids",
        "token_ids",
        torch.int64,
        (rows_of(facts, "input_ids"), sequence(facts.config)),
        0,
        high,
        padding_of(facts.config),
        ending_of(facts.config),
    )


def attention_mask(facts: ModelFacts) -> InputSpec | None:
    """`attention_mask` [batch, sequence]; of other inputs than token ids it is not known, nor of
    texts that are several rows of ids each."""
    if "input_ids" not in facts.arguments or rows_of(facts, "input_ids").step > 1:
        return None
    dims = (batch(), sequence(facts.config))
    return InputSpec("attention_mask", "attention_mask", torch.int64, dims, 0, 1)


def token_type_ids(facts: ModelFacts) -> InputSpec | None:
    """`token_type_ids` [batch, sequence].  Models without a table of types ignore them, or only
    compare them with each other."""
    kinds = number_of(text_of(facts.config), "type_vocab_size") or TYPES_WITHOUT_TABLE
    dims = (batch(), sequence(facts.config))
    return InputSpec("token_type_ids", "token_type_ids", torch.int64, dims, 0, kinds - 1)


def bbox(facts: ModelFacts) -> InputSpec | None:
    """`bbox` [batch, sequence, 4]: where on the page each token stands."""
    size = number_of(text_of(facts.config), "max_2d_position_embeddings")
    if size is None:
        return None
    dims = (batch(), sequence(facts.config), DimSpec.static(4))
    return InputSpec(BOXES, "tensor", torch.int64, dims, 0, size - 1, is_box=True)


def decoder_input_ids(facts: ModelFacts) -> InputSpec | None:
    """`decoder_input_ids` [batch, target_sequence]: a text of any length, all of it real."""
    decoder = decoder_of(facts.config)
    size = number_of(decoder, *TARGET_VOCABULARIES)
    if size is None:
        return None
    target = DimSpec(TARGET, 5, 1, longest_target(facts.config))
    return InputSpec("decoder_input_ids", "tensor", torch.int64, (batch(), target), 0, size - 1)


TEXT_INPUTS = {
    "input_ids": token_ids,
    "attention_mask": attention_mask,
    "token_type_ids": token_type_ids,
    BOXES: bbox,
    "decoder_input_ids": decoder_input_ids,
}


def pixel_values(facts: ModelFacts) -> InputSpec | None:
    """`pixel_values` [batch, channels, height, width]; [batch, frames, ...] of a video model; of a
    model that takes a grid, the patches of its images.
    """
    if facts.fixed:
        return patches("pixel_values")(facts)
    if any(name in facts.arguments for name in PACKED):
        return None
    frames = number_of(_vision(facts), *FRAME_COUNTS)
    return _pixels(facts, "pixel_values", () if frames is None else (frames,))


def pixel_values_videos(facts: ModelFacts) -> InputSpec | None:
    """`pixel_values_videos` [batch, frames, channels, height, width]."""
    frames = facts.number(*FRAME_COUNTS)
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


def patches(name: str) -> Derive:
    """`name` [patches, channels * frames * height * width of one], as a known grid has them."""

    def derive(facts: ModelFacts) -> InputSpec | None:
        grid = next((facts.fixed[name].values for name in GRIDS if name in facts.fixed), ())
        side = facts.number("patch_size")
        if not grid or side is None:
            return None
        channels = number_of(_vision(facts), *CHANNELS) or facts.number(*CHANNELS) or 3
        width = channels * (facts.number("temporal_patch_size") or 1) * side**2
        count = sum(math.prod(image) for image in grid)
        dims = (DimSpec.static(count), DimSpec.static(width))
        return InputSpec(name, "tensor", torch.float32, dims)

    return derive


def grid_of(facts: ModelFacts) -> tuple[int, int, int] | None:
    """Frames, rows and columns of the patches of an image of the size in the config; where it has
    none, of 16 x 16 patches.  Patches that are merged come in whole groups.
    """
    patch = facts.number("patch_size")
    if patch is None:
        return None
    merged = facts.number("spatial_merge_size") or 1
    height, width = _sides(_vision(facts)) or (PATCHES * patch, PATCHES * patch)
    rows, columns = (max(side // patch // merged, 1) * merged for side in (height, width))
    return 1, rows, columns


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
        step = max(numbers_of(facts.config, "feat_strides") or (1,))  # maps of strides are added
        image = tuple(
            DimSpec(axis, SIDE_WITHOUT_LIMIT, max(SMALLEST_SIDE, step), LARGEST_SIDE, step=step)
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
    for size in (*(getattr(config, name, None) for name in SIDES), *_created(config)):
        if isinstance(size, Mapping):
            size = (size.get("height"), size.get("width"))
        pair = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        if len(pair) == 2 and all(isinstance(side, int) and side > 0 for side in pair):
            height, width = pair
            return height, width
    return None


def _created(config: PreTrainedConfig) -> Iterator[object]:
    """Sizes of images in configs that hold arguments of another library's constructor (timm):
    one that the model is created with, and one that its weights are for, where it takes no other.
    """
    yield (getattr(config, "model_args", None) or {}).get("img_size")
    pretrained = getattr(config, "pretrained_cfg", None) or {}
    if pretrained.get("fixed_input_size"):
        yield tuple(pretrained.get("input_size") or ())[-2:]


VISION_INPUTS = {
    "pixel_values": pixel_values,
    "pixel_values_videos": pixel_values_videos,
    "pixel_mask": pixel_mask,
}
PATCH_INPUTS = {"hidden_states": patches("hidden_states")}
"""Of models that take images cut into patches under a name that means other things elsewhere."""


def input_features(facts: ModelFacts) -> InputSpec | None:
    """`input_features`: spectrograms [batch, mel bins, frames] or [batch, frames, features].

    Configs with `num_mel_bins` and `max_source_positions` follow Whisper, whose two convolutions
    halve the frames once: it takes exactly twice as many as it has positions, mel bins first.
    """
    width = facts.number(*FEATURES)
    if width is not None:
        return _floats("input_features", _frames(facts), DimSpec.static(width))
    bins = facts.number(*MEL_BINS)
    if bins is None:
        return None
    side = facts.number("spec_size")
    if side is not None:  # a spectrogram that is folded into a square image (CLAP)
        frames = side * (side // bins)
        return _floats("input_features", *map(DimSpec.static, (1, frames, bins)))
    positions = facts.number("max_source_positions")
    if positions is not None:
        return _floats("input_features", DimSpec.static(bins), DimSpec.static(2 * positions))
    return _floats("input_features", _frames(facts), DimSpec.static(bins))


def input_features_mask(facts: ModelFacts) -> InputSpec | None:
    """`input_features_mask` [batch, frames] of ones: all frames are sound."""
    features = input_features(facts)
    if features is None:
        return None
    bins = facts.number(*MEL_BINS)
    rows, columns = features.dims[-2:]
    frames = columns if rows.name is None and rows.size == bins else rows
    dims = (features.dims[0], frames)
    return InputSpec("input_features_mask", "tensor", torch.int64, dims, 1, 1)


def input_values(facts: ModelFacts) -> InputSpec | None:
    """`input_values`: a waveform [batch, samples], with its channels [batch, channels, samples]
    for codecs, or a spectrogram [batch, frames, mel bins] where the config gives both sizes."""
    bins, frames = (number_of(facts.config, name) for name in ("num_mel_bins", "max_length"))
    strides = _strides(facts)
    if bins is not None and frames is not None and strides is None:
        return _floats("input_values", DimSpec.static(frames), DimSpec.static(bins))
    if strides is not None:
        return _floats("input_values", _samples(strides))
    hop = _hop(facts)
    if hop is not None:
        channels = DimSpec.static(facts.number("audio_channels") or 1)
        return _floats("input_values", channels, DimSpec.static(hop * FEWEST_FRAMES))
    second = facts.number("sampling_rate", "sample_rate") or SECOND
    return _floats("input_values", DimSpec.static(second))


def decoder_input_values(facts: ModelFacts) -> InputSpec | None:
    """`decoder_input_values` [batch, target_sequence, mel bins]: the spectrogram so far."""
    bins = facts.number(*MEL_BINS)
    if bins is None:
        return None
    target = DimSpec(TARGET, 5, 1, longest_target(facts.config))
    return _floats("decoder_input_values", target, DimSpec.static(bins))


def _floats(name: str, *dims: DimSpec) -> InputSpec:
    return InputSpec(name, "tensor", torch.float32, (batch(), *dims))


def _frames(facts: ModelFacts) -> DimSpec:
    """As many frames as a text may have tokens, or as there are positions for them."""
    longest = facts.number("max_source_positions", "max_position_embeddings")
    longest = max(longest or FRAMES_WITHOUT_LIMIT, FEWEST_FRAMES)
    return DimSpec("frames", min(2 * FEWEST_FRAMES, longest), FEWEST_FRAMES, longest)


def _strides(facts: ModelFacts) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Kernels and strides of the convolutions that turn a waveform into frames (wav2vec 2.0)."""
    kernels, strides = (numbers_of(facts.config, f"conv_{what}") for what in ("kernel", "stride"))
    if kernels is None or strides is None or len(kernels) != len(strides):
        return None
    return kernels, strides


def _samples(convolutions: tuple[tuple[int, ...], tuple[int, ...]]) -> DimSpec:
    fewest, longest = (samples_for(steps, convolutions) for steps in (FEWEST_STEPS, LONGEST_STEPS))
    return DimSpec("samples", samples_for(2 * FEWEST_STEPS, convolutions), fewest, longest)


def samples_for(steps: int, convolutions: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """The fewest samples that unpadded convolutions turn into `steps` frames."""
    needed = steps
    for kernel, stride in zip(*map(reversed, convolutions), strict=True):
        needed = (needed - 1) * stride + kernel
    return needed


def _hop(facts: ModelFacts) -> int | None:
    """Samples that a codec turns into one frame."""
    for name in ("upsampling_ratios", "downsampling_ratios", "upsample_rates"):
        ratios = next((r for part in facts.parts if (r := numbers_of(part, name))), None)
        if ratios is not None:
            return math.prod(ratios)
    return facts.number("hop_length")


AUDIO_INPUTS = {
    "input_features": input_features,
    "input_features_mask": input_features_mask,
    "input_values": input_values,
    "decoder_input_values": decoder_input_values,
}


def past(name: str, dtype: torch.dtype, rank: int = 3, only: int | None = None) -> Derive:
    """`name` [batch, steps], or [batch, steps, channels] for series of several values.

    Of its dimensions the first `rank`; all of its values are `only`, where that is given.
    """

    def derive(facts: ModelFacts) -> InputSpec | None:
        dims = _past(facts)
        return None if dims is None else InputSpec(name, "tensor", dtype, dims[:rank], only, only)

    return derive


def past_time_features(facts: ModelFacts) -> InputSpec | None:
    """`past_time_features` [batch, steps, features]."""
    dims, features = _past(facts), number_of(facts.config, "num_time_features")
    if dims is None or features is None:
        return None
    return _floats("past_time_features", dims[1], DimSpec.static(features))


def freq(facts: ModelFacts) -> InputSpec | None:
    """`freq` [batch, 1]: which of the known frequencies a series has."""
    kinds = number_of(facts.config, "freq_size")
    if kinds is None:
        return None
    return InputSpec("freq", "tensor", torch.int64, (batch(), DimSpec.static(1)), 0, kinds - 1)


def as_documented(facts: ModelFacts, name: str) -> InputSpec | None:
    """Floats of the shape that `forward` documents: (batch_size, .., ..), where each other size is
    a length, which varies, a side of an image, or has the name of a number in the config.
    """
    kind, _, shape = facts.shapes.get(name, "").partition(" of shape ")
    parts = [part.strip(" `") for part in shape.strip("()").split(",") if part.strip()]
    if kind not in ("Tensor", "FloatTensor") or parts[:1] != ["batch_size"] or len(parts) < 3:
        return None
    dims = []
    sides = dict(zip(("height", "width"), _sides(_vision(facts)) or (), strict=False))
    for part in parts[1:]:
        size = int(part) if part.isdigit() else sides.get(part, facts.number(part))
        if size is not None:
            dims.append(DimSpec.static(size))
        elif part in LENGTHS:
            dims.append(DimSpec("rows", 6, 1, _most_rows(facts)))
        else:
            return None
    return _floats(name, *dims)


def _most_rows(facts: ModelFacts) -> int:
    return facts.number("max_position_embeddings", "n_positions") or ROWS_WITHOUT_LIMIT


def rows(name: str, *fields: str) -> Derive:
    """An input [batch, rows, width] of floats, whose width is in one of `fields`."""

    def derive(facts: ModelFacts) -> InputSpec | None:
        width = number_of(facts.config, *fields)
        if width is None:
            return None
        return _floats(name, DimSpec("rows", 6, 1, _most_rows(facts)), DimSpec.static(width))

    return derive


def _past(facts: ModelFacts) -> tuple[DimSpec, ...] | None:
    """Models with lags look further back than their context."""
    context = number_of(facts.config, "context_length")
    if context is None:
        return None
    lags = getattr(facts.config, "lags_sequence", None) or [0]
    steps = DimSpec.static(context + max(lags))
    channels = number_of(facts.config, "num_input_channels")
    width = channels or number_of(facts.config, "input_size") or 1
    is_wide = channels is not None or width > 1
    return (batch(), steps, DimSpec.static(width)) if is_wide else (batch(), steps)


SERIES_INPUTS: dict[str, Derive] = {
    "past_values": past("past_values", torch.float32),
    "past_observed_mask": past("past_observed_mask", torch.bool),
    "past_values_padding": past("past_values_padding", torch.int64, rank=2, only=0),
    "past_time_features": past_time_features,
    "freq": freq,
    "inputs": rows("inputs", "d_model"),
    "query_embeds": rows("query_embeds", "hidden_size"),
}
