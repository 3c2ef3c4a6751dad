"""Inputs of a decoder step: the new tokens, and the cached keys and values of earlier ones."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from enginecast.capture.inputs.derive.known_inputs import batch, largest_id
from enginecast.capture.inputs.examples import positions_of
from enginecast.capture.inputs.specs import SEQUENCE, DimSpec, InputSpec, with_example_sizes
from enginecast.capture.sources.decoder import IDS, MASK, POSITIONS, DecoderSource
from enginecast.capture.sources.text_config import SEQUENCE_WITHOUT_LIMIT, limit_of
from enginecast.errors import UsageError

PAST, TOTAL = "past", "total"
EXAMPLE_PAST, EXAMPLE_TOKENS = 5, 7


def decoder_inputs(source: DecoderSource) -> tuple[InputSpec, ...]:
    """`input_ids` [batch, sequence], `attention_mask` [batch, total], `position_ids`
    [batch, sequence] and the keys and values [batch, heads, past, width] of each layer, where
    total is past + sequence.  There may be no past.

    Raises:
        UsageError: the config has no vocabulary.
    """
    config = source.config
    high = None if config is None else largest_id(config)
    if config is None or high is None:
        raise UsageError(f"{source.name}: the config does not say how large the vocabulary is")
    limit = limit_of(config)
    most = limit or SEQUENCE_WITHOUT_LIMIT
    if most < EXAMPLE_PAST:
        raise UsageError(f"{source.name}: {most} positions are too few to generate text with")
    sequence = DimSpec(SEQUENCE, min(EXAMPLE_TOKENS, most), 1, most)
    past = DimSpec(PAST, min(EXAMPLE_PAST, most - 1), 0, most - 1)
    cap = {} if limit is None else {"cap": limit}
    total = DimSpec.sum_of(TOTAL, (past, sequence), **cap)
    specs = [
        InputSpec(
            *(IDS, "token_ids", torch.int64, (batch(), sequence), 0, high),
            source.padding,
            next(iter(source.endings), None),
        ),
        InputSpec(MASK, "attention_mask", torch.int64, (batch(), total), 0, 1),
    ]
    if source.takes_positions:
        dims = (batch(), sequence)
        specs.append(InputSpec(POSITIONS, "position_ids", torch.int64, dims, 0, most - 1))
    names = iter(source.past)
    for layer in source.layers:
        for width in layer.widths().values():
            static = DimSpec.static(layer.heads), DimSpec.static(width)
            kept = (batch(), static[0], past, static[1])
            specs.append(InputSpec(next(names), "tensor", torch.float32, kept))
    return with_example_sizes(tuple(specs))


def prompt_inputs(
    source: DecoderSource, specs: Sequence[InputSpec], ids: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """The inputs for prompts without a past.

    Args:
        ids, mask: [batch, tokens].
    """
    known = {source.ids: ids, source.mask: mask, POSITIONS: positions_of(mask)}
    return {spec.name: _of_text(spec, known, ids) for spec in specs}


def _of_text(spec: InputSpec, known: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    if spec.name in known:
        return known[spec.name]
    shape = [dim.size if dim.name is None else 0 for dim in spec.dims[1:]]
    return torch.zeros(len(ids), *shape, dtype=spec.dtype)
