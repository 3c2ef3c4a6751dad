"""Token ids, their masks, and the text that a decoder has so far."""

import torch
from transformers import PreTrainedConfig

from enginecast.capture.inputs.derive.model_facts import ModelFacts
from enginecast.capture.inputs.specs import (
    BATCH,
    BOXES,
    LARGEST_BATCH,
    SEQUENCE,
    DimSpec,
    InputSpec,
)
from enginecast.capture.sources.text_config import (
    decoder_of,
    ending_of,
    longest_sequence,
    longest_target,
    number_of,
    padding_of,
    sequence_step,
    text_of,
)

TARGET = "target_sequence"
VOCABULARIES = ("src_vocab_size", "vocab_size", "text_vocab_size", "text_encoder_vocab_size")
TARGET_VOCABULARIES = ("tgt_vocab_size", "decoder_vocab_size", "vocab_size")
CODE_POINTS = 0x110000
"""Ids of models that hash the characters of a text: all of Unicode."""


def batch() -> DimSpec:
    """The first dimension of every derived input."""
    return DimSpec(BATCH, 3, 1, LARGEST_BATCH)


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
        (batch(), sequence(facts.config)),
        0,
        high,
        padding_of(facts.config),
        ending_of(facts.config),
    )


def attention_mask(facts: ModelFacts) -> InputSpec | None:
    """`attention_mask` [batch, sequence]; of other inputs than token ids it is not known."""
    if "input_ids" not in facts.arguments:
        return None
    dims = (batch(), sequence(facts.config))
    return InputSpec("attention_mask", "attention_mask", torch.int64, dims, 0, 1)


def token_type_ids(facts: ModelFacts) -> InputSpec | None:
    """`token_type_ids` [batch, sequence]."""
    kinds = number_of(text_of(facts.config), "type_vocab_size") or 1
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
