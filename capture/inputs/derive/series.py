"""Time series and other rows of numbers whose sizes a config gives."""

from collections.abc import Callable

import torch

from enginecast.capture.inputs.derive.model_facts import ModelFacts, number_of
from enginecast.capture.inputs.derive.text import batch
from enginecast.capture.inputs.specs import DimSpec, InputSpec

Derive = Callable[[ModelFacts], InputSpec | None]


def past_values(facts: ModelFacts) -> InputSpec | None:
    """`past_values` [batch, steps], or [batch, steps, channels] for series of several values."""
    dims = _past(facts)
    return None if dims is None else InputSpec("past_values", "tensor", torch.float32, dims)


def past_observed_mask(facts: ModelFacts) -> InputSpec | None:
    """`past_observed_mask`, shaped as `past_values`: which of them were measured."""
    dims = _past(facts)
    return None if dims is None else InputSpec("past_observed_mask", "tensor", torch.bool, dims)


def past_values_padding(facts: ModelFacts) -> InputSpec | None:
    """`past_values_padding` [batch, steps] of zeros: nothing is filled up."""
    dims = _past(facts)
    if dims is None:
        return None
    return InputSpec("past_values_padding", "tensor", torch.int64, dims[:2], 0, 0)


def past_time_features(facts: ModelFacts) -> InputSpec | None:
    """`past_time_features` [batch, steps, features]."""
    dims, features = _past(facts), number_of(facts.config, "num_time_features")
    if dims is None or features is None:
        return None
    dims = (*dims[:2], DimSpec.static(features))
    return InputSpec("past_time_features", "tensor", torch.float32, dims)


def freq(facts: ModelFacts) -> InputSpec | None:
    """`freq` [batch, 1]: which of the known frequencies a series has."""
    kinds = number_of(facts.config, "freq_size")
    if kinds is None:
        return None
    return InputSpec("freq", "tensor", torch.int64, (batch(), DimSpec.static(1)), 0, kinds - 1)


def rows(name: str, *fields: str) -> Derive:
    """An input [batch, rows, width] of floats, whose width is in one of `fields`."""

    def derive(facts: ModelFacts) -> InputSpec | None:
        width = number_of(facts.config, *fields)
        if width is None:
            return None
        length = DimSpec(
            "rows", 6, 1, facts.number("max_position_embeddings", "n_positions") or 512
        )
        return InputSpec(name, "tensor", torch.float32, (batch(), length, DimSpec.static(width)))

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
    "past_values": past_values,
    "past_observed_mask": past_observed_mask,
    "past_values_padding": past_values_padding,
    "past_time_features": past_time_features,
    "freq": freq,
    "inputs": rows("inputs", "d_model"),
    "query_embeds": rows("query_embeds", "hidden_size"),
}
