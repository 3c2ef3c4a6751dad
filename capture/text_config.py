"""What a config says of token ids: the longest sequence, padding, end of text."""

from typing import Any

from transformers import PreTrainedConfig

SEQUENCE_WITHOUT_LIMIT = 512
"""Longest sequence where the config gives none, as T5's with its relative positions."""

OFFSET_POSITIONS = frozenset(
    {
        "camembert",
        "data2vec-text",
        "ibert",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Kinds whose first position is the padding id plus one, so that the table holds fewer tokens."""


def longest_sequence(config: PreTrainedConfig | None, example: int) -> int:
    """Most tokens that the model takes; at least `example`, where the config gives no limit."""
    if config is None:
        return max(SEQUENCE_WITHOUT_LIMIT, example)
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return max(SEQUENCE_WITHOUT_LIMIT, example)
    if config.model_type in OFFSET_POSITIONS:
        return positions - (padding_of(config) or 0) - 1
    return positions


def padding_of(config: PreTrainedConfig | None) -> int | None:
    """The id that fills up a row; 0 where the config names none."""
    padding: Any = getattr(config.get_text_config(), "pad_token_id", None) if config else None
    return padding if isinstance(padding, int) else 0


def ending_of(config: PreTrainedConfig | None) -> int | None:
    """The end-of-text id, where the config names one that is in the vocabulary."""
    text = config.get_text_config() if config is not None else None
    ending: Any = getattr(text, "eos_token_id", None)
    vocabulary: Any = getattr(text, "vocab_size", 0)
    return ending if isinstance(ending, int) and 0 <= ending < vocabulary else None
