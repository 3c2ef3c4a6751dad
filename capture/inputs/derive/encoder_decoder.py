"""Inputs of a decoder step that attends to an encoder's output."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from enginecast.capture.inputs.derive.decoder import EXAMPLE_PAST, EXAMPLE_TOKENS, PAST, TOTAL
from enginecast.capture.inputs.derive.known_inputs import TARGET_VOCABULARIES, batch
from enginecast.capture.inputs.examples import example_sizes, without_data
from enginecast.capture.inputs.specs import (
    BATCH,
    SEQUENCE,
    DimSpec,
    InputSpec,
    named_dims,
    with_example_sizes,
)
from enginecast.capture.python.quiet import quiet_torch, quiet_transformers
from enginecast.capture.sources.empty import fake_weights
from enginecast.capture.sources.encoder_decoder import (
    ENCODER_MASK,
    HINT,
    CrossDecoderSource,
    EncoderSource,
)
from enginecast.capture.sources.text_config import decoder_of, longest_target, number_of
from enginecast.errors import SourceError, UsageError

ENCODED = "encoder_sequence"
ROWS = 2
"""Batch size of the encoder runs that determine its output length."""


def cross_decoder_inputs(
    source: CrossDecoderSource, specs: Sequence[InputSpec]
) -> tuple[InputSpec, ...]:
    """`decoder_input_ids` [batch, sequence], `decoder_attention_mask` [batch, total],
    `encoder_attention_mask` [batch, encoder_sequence] where the encoder reads text, the keys and
    values [batch, heads, past, width] of each layer, and those of the encoder's output
    [batch, heads, encoder_sequence, width], where total is past + sequence.

    Args:
        specs: the inputs of the encoder.

    Raises:
        SourceError: the encoder does not run.
        UsageError: the config has no vocabulary.
    """
    config = source.config
    size = None if config is None else number_of(decoder_of(config), *TARGET_VOCABULARIES)
    if config is None or size is None:
        raise UsageError(f"{source.name}: the config does not say how large the vocabulary is")
    most = longest_target(config)
    if most < EXAMPLE_PAST:
        raise UsageError(f"{source.name}: {most} positions are too few to generate text with")
    sequence = DimSpec(SEQUENCE, min(EXAMPLE_TOKENS, most), 1, most)
    past = DimSpec(PAST, min(EXAMPLE_PAST, most - 1), 0, most - 1)
    total = DimSpec.sum_of(TOTAL, (past, sequence), cap=most)
    length = encoded_length(source.encoder, specs)
    ending = next(iter(source.endings), None)
    padding = source.padding
    inputs = [
        InputSpec(
            *(source.ids, "token_ids", torch.int64, (batch(), sequence), 0, size - 1),
            *(padding, ending),
        ),
        # What a decoder reads has no padding: ones alone.
        InputSpec(source.mask, "tensor", torch.int64, (batch(), total), 1, 1),
    ]
    if source.encoder.is_masked:
        dims = (batch(), length)
        inputs.append(InputSpec(ENCODER_MASK, "attention_mask", torch.int64, dims, 0, 1))
    sides = source.sides
    for names, layers, tokens in (
        (source.past, sides.own, past),
        (source.cross, sides.cross, length),
    ):
        left = iter(names)
        for layer in layers:
            for width in layer.widths().values():
                heads, wide = DimSpec.static(layer.heads), DimSpec.static(width)
                kept = (batch(), heads, tokens, wide)
                inputs.append(InputSpec(next(left), "tensor", torch.float32, kept))
    return with_example_sizes(tuple(inputs))


def encoded_length(source: EncoderSource, specs: Sequence[InputSpec]) -> DimSpec:
    """The sequence dimension of the encoder's output: static if all inputs give one length.

    Raises:
        SourceError: the encoder does not run.
    """
    module = source.empty()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_weights(module, mode)
    dims = named_dims(specs)
    least = {name: dim.minimum for name, dim in dims.items()}
    most = {name: dim.maximum for name, dim in dims.items()}
    lengths = []
    for sizes in (least, example_sizes(specs), most):
        inputs = without_data(specs, {**sizes, BATCH: ROWS})
        try:
            with torch.no_grad(), quiet_torch(), quiet_transformers(), mode:
                fakes = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in inputs.items()}
                found: Mapping[str, Tensor] = module(**fakes)
        except Exception as error:  # the model's own code
            raise SourceError(
                f"{source.name} does not run without values, which tells the length of its output:"
                f" {type(error).__name__}: {error}",
                hint=HINT,
            ) from error
        lengths.append(int(next(iter(found.values())).shape[2]))
    low, example, high = lengths
    if low == high:
        return DimSpec.static(low)
    return DimSpec(ENCODED, example, max(low, 1), high)
