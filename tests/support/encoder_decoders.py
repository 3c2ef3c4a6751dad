"""Tiny encoder-decoders with seeded weights, outliers among them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

IDS: dict[str, Any] = {
    "vocab_size": 99,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
LAYERS = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
}
T5_SIZES: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "n_positions": 96,
}
SOUND = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 96}
NO_TOKENS = {"suppress_tokens": None, "begin_suppress_tokens": None}

MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(**T5_SIZES, **IDS, tie_word_embeddings=False)
    ),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(**LAYERS, **IDS, max_position_embeddings=96, forced_eos_token_id=None)
    ),
    "whisper": lambda: WhisperForConditionalGeneration(
        WhisperConfig(**LAYERS, **IDS, **SOUND, **NO_TOKENS, bos_token_id=1)
    ),
}


TEXT = {**LAYERS, **IDS, "max_position_embeddings": 96}
MORE: Mapping[str, Callable[[], PreTrainedModel]] = {
    "marian": lambda: MarianMTModel(MarianConfig(**TEXT, forced_eos_token_id=None)),
    "mbart": lambda: MBartForConditionalGeneration(MBartConfig(**TEXT)),
    "m2m_100": lambda: M2M100ForConditionalGeneration(M2M100Config(**TEXT)),
    "blenderbot": lambda: BlenderbotForConditionalGeneration(BlenderbotConfig(**TEXT)),
    "pegasus": lambda: PegasusForConditionalGeneration(PegasusConfig(**TEXT)),
    "moonshine": lambda: MoonshineForConditionalGeneration(
        MoonshineConfig(
            **{**IDS, "bos_token_id": 1, "hidden_size": 32, "intermediate_size": 48},
            **{"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2},
            **{"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4},
            max_position_embeddings=96,
        )
    ),
    "trocr": lambda: _reader_of_images(),
}


def _reader_of_images() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = ViTConfig(**sizes, intermediate_size=48, image_size=32, patch_size=8)
    decoder = TrOCRConfig(
        **{
            name: size
            for name, size in TEXT.items()
            if name.startswith(("d", "v", "m", "pad", "e"))
        },
        cross_attention_hidden_size=32,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = VisionEncoderDecoderModel(config)
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    model.generation_config = GenerationConfig(
        decoder_start_token_id=1, pad_token_id=0, eos_token_id=2
    )
    return model


def small_one() -> PreTrainedModel:
    """A model of one layer and few sizes, whose export takes seconds."""
    sizes = {name: 1 if name.endswith("layers") else 8 for name in LAYERS}
    sizes |= {name: 2 for name in LAYERS if name.endswith("heads")}
    config = MarianConfig(
        **sizes, **{**IDS, "vocab_size": 29}, max_position_embeddings=12, forced_eos_token_id=None
    )
    return seeded(lambda: MarianMTModel(config), 0, 0.4)


def encoder_decoder(name: str, seed: int = 0) -> PreTrainedModel:
    """A model that continues in its own way, not by repeating a token."""
    return seeded({**MODELS, **MORE}[name], seed, 0.3 if name == "t5" else 0.15)


def seeded(
    make: Callable[[], PreTrainedModel], seed: int = 0, scale: float = 0.15
) -> PreTrainedModel:
    """A model with such weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, scale)
                    parameter.flatten(1)[:, :2] *= 4
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
