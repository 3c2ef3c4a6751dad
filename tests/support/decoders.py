"""Tiny language models with seeded weights, outliers among them."""

from collections.abc import Callable, Mapping

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NARROW = {**SIZES, "intermediate_size": 48}
GROUPED = {**NARROW, "num_key_value_heads": 2}
HEADS_OF_8 = {**GROUPED, "head_dim": 8}

CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "gpt2": lambda: GPT2Config(**SIZES),
    "qwen2": lambda: Qwen2Config(**{**GROUPED, "num_key_value_heads": 1}),
    "qwen3": lambda: Qwen3Config(**HEADS_OF_8),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=6),
    "gemma2": lambda: Gemma2Config(**HEADS_OF_8, sliding_window=6),
    "falcon": lambda: FalconConfig(**SIZES, multi_query=True, parallel_attn=True, bias=False),
    "bloom": lambda: BloomConfig(**SIZES),
    "opt": lambda: OPTConfig(**{**SIZES, "pad_token_id": 1}, ffn_dim=48, word_embed_proj_dim=32),
    "neox": lambda: GPTNeoXConfig(**NARROW),
}


def decoder(name: str, seed: int = 0) -> PreTrainedModel:
    """A model that continues texts in its own way, not by repeating a token."""
    return decoder_of(CONFIGS[name](), seed)


def decoder_of(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Such a model of a config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.15)
                    parameter[:, :2] *= 4
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
