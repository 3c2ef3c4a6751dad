"""What a config says about token ids: the longest sequence, blocks, padding, end of text."""

import math
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

SEQUENCE_WITHOUT_LIMIT = 512
"""Longest sequence where the config gives none, as T5's with its relative positions."""

POSITIONS = (
    "max_encoder_position_embeddings",
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
)
"""Where configs keep the number of positions of their table, or that they were trained with."""

TARGET_POSITIONS = ("max_target_positions", "max_decoder_position_embeddings", *POSITIONS)

OFFSET_POSITIONS = frozenset(
    {
        "altclip",
        "altclip_text_model",
        "bridgetower",
        "bridgetower_text_model",
        "camembert",
        "clap_text_model",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Kinds whose first position is the padding id plus one, so that the table holds fewer tokens."""

PLACEHOLDERS = tuple(
    f"{what}_token_{form}"
    for what in ("image", "video", "audio", "speech", "img_context")
    for form in ("id", "index")
)
"""Ids that hold the place of features: as many must be in the text as its images have patches."""


def placeholders_of(config: PreTrainedConfig) -> dict[str, int]:
    """The ids that hold the place of features, by their names in the config."""
    named = {name: getattr(config, name, None) for name in PLACEHOLDERS}
    return {name: value for name, value in named.items() if type(value) is int}


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and the configs inside it, outermost first."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part that describes the text a model reads: of an encoder and a decoder, the encoder."""
    encoder = getattr(config, "encoder", None)
    return text_of(encoder) if isinstance(encoder, PreTrainedConfig) else _text_part(config)


def decoder_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part that describes the text a decoder writes."""
    decoder = getattr(config, "decoder", None)
    return decoder_of(decoder) if isinstance(decoder, PreTrainedConfig) else _text_part(config)


def longest_sequence(config: PreTrainedConfig | None, example: int) -> int:
    """Most tokens that the model takes; at least `example`, where the config gives no limit."""
    limit = limit_of(config) if config is not None else None
    return max(SEQUENCE_WITHOUT_LIMIT, example) if limit is None else limit


def limit_of(config: PreTrainedConfig) -> int | None:
    """Most tokens that the model takes; None where the config gives no limit."""
    text = text_of(config)
    positions = number_of(text, *POSITIONS)
    if positions is None:
        return None
    if OFFSET_POSITIONS & {config.model_type, text.model_type}:
        return positions - (padding_of(config) or 0) - 1
    return positions


def longest_target(config: PreTrainedConfig) -> int:
    """Most tokens that the decoder takes."""
    return number_of(decoder_of(config), *TARGET_POSITIONS) or SEQUENCE_WITHOUT_LIMIT


def sequence_step(config: PreTrainedConfig) -> int:
    """Tokens of a block, where the model works in blocks and pads a text up to the next; else 1.

    Sliding windows of ordinary attention are not blocks: they are a mask.
    """
    text = text_of(config)
    window: Any = getattr(text, "attention_window", None)
    windows = window if isinstance(window, (list, tuple)) else [window]
    steps = [size for size in windows if isinstance(size, int) and size > 0]
    if getattr(text, "attention_type", None) == "block_sparse":
        steps.append(number_of(text, "block_size") or 1)
    radius = number_of(text, "local_radius")
    if radius is not None:
        steps.append(radius + 1)
    chunks = ("local_attn_chunk_length", "lsh_attn_chunk_length")
    steps += [getattr(text, name, None) or 1 for name in chunks]
    return math.lcm(*steps)


def padding_of(config: PreTrainedConfig | None) -> int | None:
    """The id that fills up a row; 0 where the config names none of the vocabulary."""
    text = text_of(config) if config is not None else None
    padding: Any = getattr(text, "pad_token_id", None)
    vocabulary: Any = getattr(text, "vocab_size", None)
    if not isinstance(padding, int) or padding < 0:
        return 0
    return 0 if isinstance(vocabulary, int) and padding >= vocabulary else padding


def ending_of(config: PreTrainedConfig | None) -> int | None:
    """The end-of-text id, where the config names one that is in the vocabulary."""
    text = text_of(config) if config is not None else None
    ending: Any = getattr(text, "eos_token_id", None)
    vocabulary: Any = getattr(text, "vocab_size", None)
    if not isinstance(ending, int) or not isinstance(vocabulary, int):
        return None
    return ending if 0 <= ending < vocabulary else None


def _text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    try:
        return config.get_text_config()
    except ValueError:  # several texts: transformers does not choose; the one that is read does
        named = (getattr(config, name, None) for name in ("text_encoder", "text_config"))
        return next((part for part in named if isinstance(part, PreTrainedConfig)), config)


def number_of(config: object, *names: str) -> int | None:
    """The first of `names` under which `config` has a positive whole number."""
    values = (getattr(config, name, None) for name in names)
    return next((v for v in values if type(v) is int and v > 0), None)
