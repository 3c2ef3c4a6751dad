"""Sound: waveforms and spectrograms."""

import math

import torch

from enginecast.capture.inputs.derive.model_facts import ModelFacts, number_of, numbers_of
from enginecast.capture.inputs.derive.text import TARGET, batch
from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.capture.sources.text_config import longest_target

FRAMES = "frames"
SAMPLES = "samples"
MEL_BINS = ("num_mel_bins", "n_mels", "input_feat_size")
FEATURES = ("input_feat_per_channel", "feature_projection_input_dim")
"""Width of a frame in configs of models that take [batch, frames, features]."""

FRAMES_WITHOUT_LIMIT = 1024
FEWEST_FRAMES = 32
"""Convolutions over frames halve them up to four times."""

FEWEST_STEPS = 8
"""Frames that the shortest waveform gives: a few, so that the position convolution sees some."""
LONGEST_STEPS = 512
SECOND = 16000
"""Samples, where the config gives neither a rate nor convolutions."""


def input_features(facts: ModelFacts) -> InputSpec | None:
    """`input_features`: spectrograms [batch, mel bins, frames] or [batch, frames, features].

    Configs with `num_mel_bins` and `max_source_positions` follow Whisper, whose two convolutions
    halve the frames once: it takes exactly twice as many as it has positions, mel bins first.
    """
    width = facts.number(*FEATURES)
    if width is not None:
        return _spectrogram(facts, (_frames(facts), DimSpec.static(width)))
    bins = facts.number(*MEL_BINS)
    if bins is None:
        return None
    side = facts.number("spec_size")
    if side is not None:  # a spectrogram that is folded into a square image (CLAP)
        frames = side * (side // bins)
        return _spectrogram(facts, tuple(map(DimSpec.static, (1, frames, bins))))
    positions = facts.number("max_source_positions")
    if positions is not None:
        return _spectrogram(facts, (DimSpec.static(bins), DimSpec.static(2 * positions)))
    return _spectrogram(facts, (_frames(facts), DimSpec.static(bins)))


def input_features_mask(facts: ModelFacts) -> InputSpec | None:
    """`input_features_mask` [batch, frames] of ones: all frames are sound."""
    features = input_features(facts)
    if features is None:
        return None
    bins = facts.number(*MEL_BINS)
    frames = next(dim for dim in features.dims[1:] if dim.name or dim.size != bins)
    dims = (features.dims[0], frames)
    return InputSpec("input_features_mask", "tensor", torch.int64, dims, 1, 1)


def input_values(facts: ModelFacts) -> InputSpec | None:
    """`input_values`: a waveform [batch, samples], with its channels [batch, channels, samples]
    for codecs, or a spectrogram [batch, frames, mel bins] where the config gives both sizes."""
    bins, frames = (number_of(facts.config, name) for name in ("num_mel_bins", "max_length"))
    strides = _strides(facts)
    if bins is not None and frames is not None and strides is None:
        dims = (DimSpec.static(frames), DimSpec.static(bins))
        return InputSpec("input_values", "tensor", torch.float32, (batch(), *dims))
    if strides is not None:
        return _values((_samples(facts, strides),))
    hop = _hop(facts)
    if hop is not None:
        channels = DimSpec.static(facts.number("audio_channels") or 1)
        return _values((channels, DimSpec.static(hop * FEWEST_FRAMES)))
    return _values((DimSpec.static(facts.number("sampling_rate", "sample_rate") or SECOND),))


def decoder_input_values(facts: ModelFacts) -> InputSpec | None:
    """`decoder_input_values` [batch, target_sequence, mel bins]: the spectrogram so far."""
    bins = facts.number(*MEL_BINS)
    if bins is None:
        return None
    target = DimSpec(TARGET, 5, 1, longest_target(facts.config))
    dims = (batch(), target, DimSpec.static(bins))
    return InputSpec("decoder_input_values", "tensor", torch.float32, dims)


def _spectrogram(facts: ModelFacts, dims: tuple[DimSpec, ...]) -> InputSpec:
    return InputSpec("input_features", "tensor", torch.float32, (batch(), *dims))


def _values(dims: tuple[DimSpec, ...]) -> InputSpec:
    return InputSpec("input_values", "tensor", torch.float32, (batch(), *dims))


def _frames(facts: ModelFacts) -> DimSpec:
    """As many frames as a text may have tokens, or as there are positions for them."""
    longest = facts.number("max_source_positions", "max_position_embeddings")
    longest = max(longest or FRAMES_WITHOUT_LIMIT, FEWEST_FRAMES)
    return DimSpec(FRAMES, min(2 * FEWEST_FRAMES, longest), FEWEST_FRAMES, longest)


def _strides(facts: ModelFacts) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Kernels and strides of the convolutions that turn a waveform into frames (wav2vec 2.0)."""
    kernels, strides = (numbers_of(facts.config, f"conv_{what}") for what in ("kernel", "stride"))
    if kernels is None or strides is None or len(kernels) != len(strides):
        return None
    return kernels, strides


def _samples(facts: ModelFacts, convolutions: tuple[tuple[int, ...], tuple[int, ...]]) -> DimSpec:
    fewest, longest = (samples_for(steps, convolutions) for steps in (FEWEST_STEPS, LONGEST_STEPS))
    return DimSpec(SAMPLES, samples_for(2 * FEWEST_STEPS, convolutions), fewest, longest)


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
