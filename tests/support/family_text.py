"""Families that read text: encoders, and decoders whose hidden states are taken."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from family import HEADS, TEXT, WIDE, Family, saved, tokens
from family_vision import SIGLIP_TEXT
from models import VOCABULARY, save
from transformers import PreTrainedModel

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    # 61 tokens are further apart than the last of these buckets.
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}


def flan(folder: Path) -> Path:
    """FLAN-T5: gated GELU, and a checkpoint that has the decoder and a head of its own."""
    config = transformers.T5Config(
        **T5,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        architectures=["T5ForConditionalGeneration"],
    )
    return save(transformers.T5ForConditionalGeneration, config, folder, torch.float32, 3)


def decoder_like(
    name: str,
    model_class: type[PreTrainedModel],
    fused: Mapping[str, int],
    *,
    is_slow: bool = False,
    **fields: Any,
) -> Family:
    """A decoder without head that gives hidden states, with grouped key-value heads."""
    config_class = model_class.config_class
    assert config_class is not None
    sizes = {**TEXT, **GROUPED, "intermediate_size": 48, "max_position_embeddings": 80, **fields}
    config = config_class(**sizes)
    return Family(
        name,
        model_class,
        saved(model_class, config),
        tokens(80),
        WIDE,
        fused,
        is_slow,
        weight="layers.1.self_attn.v_proj.weight",
    )


def t5_like(name: str, model_class: type[PreTrainedModel], **fields: object) -> Family:
    """A T5 encoder, saved alone."""
    config_class = model_class.config_class
    assert config_class is not None
    return Family(
        name,
        model_class,
        saved(model_class, config_class(**T5, architectures=[model_class.__name__], **fields)),
        tokens(512),
        WIDE,
        {"rms-norm": 5, "residual+norm": 4, "attention": 2},
        is_slow=True,
        weight="encoder.block.1.layer.0.SelfAttention.o.weight",
    )


def clip_text() -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        **TEXT, **HEADS, max_position_embeddings=77, eos_token_id=VOCABULARY - 1
    )


def roberta() -> transformers.RobertaConfig:
    """66 rows of positions, of which tokens use those from 2 on."""
    return transformers.RobertaConfig(
        **TEXT, **HEADS, max_position_embeddings=66, pad_token_id=1, type_vocab_size=1
    )


def modernbert() -> transformers.ModernBertConfig:
    """Layers that see 8 tokens between layers that see all."""
    return transformers.ModernBertConfig(
        **(TEXT | {"num_hidden_layers": 3}),
        **HEADS,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        local_attention=16,
        max_position_embeddings=80,
        pad_token_id=0,
        bos_token_id=1,
        cls_token_id=1,
        eos_token_id=2,
        sep_token_id=2,
    )


SLIDING = ["sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {
    "layer_types": SLIDING,
    "sliding_window": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 8,
}
SKIPS = {"residual+norm": 4}
RMS = {"rms-norm": 5, "attention": 2, **SKIPS}


def text_families() -> list[Family]:
    """Encoders of text."""
    return [
        t5_like("t5", transformers.T5EncoderModel),
        t5_like("mt5", transformers.MT5EncoderModel, feed_forward_proj="gated-gelu"),
        t5_like("umt5", transformers.UMT5EncoderModel),
        Family(
            "flan-t5",
            transformers.T5EncoderModel,
            flan,
            tokens(512),
            WIDE,
            {"rms-norm": 5, "residual+norm": 4, "attention": 2},
            is_slow=True,
            weight="encoder.block.1.layer.0.SelfAttention.o.weight",
        ),
        Family(
            "bert",
            transformers.BertModel,
            saved(transformers.BertModel, transformers.BertConfig(**TEXT, **HEADS)),
            tokens(512),
            WIDE,
            {"attention": 2},
            is_slow=True,
            weight="encoder.layer.1.intermediate.dense.weight",
        ),
        Family(
            "roberta",
            transformers.RobertaModel,
            saved(transformers.RobertaModel, roberta()),
            tokens(64),
            {"batch": 3, "sequence": 64},
            {"attention": 2},
            is_slow=True,
            weight="encoder.layer.1.intermediate.dense.weight",
        ),
        Family(
            "modernbert",
            transformers.ModernBertModel,
            saved(transformers.ModernBertModel, modernbert()),
            tokens(80),
            WIDE,
            {"attention": 3},
            is_slow=True,
            weight="layers.1.mlp.Wi.weight",
        ),
        Family(
            "clip-text",
            transformers.CLIPTextModel,
            saved(transformers.CLIPTextModel, clip_text()),
            tokens(77),
            {"batch": 3, "sequence": 71},
            {"attention": 2},
            is_slow=True,
            weight="encoder.layers.1.mlp.fc1.weight",
        ),
        Family(
            "siglip-text",
            transformers.SiglipTextModel,
            saved(transformers.SiglipTextModel, transformers.SiglipTextConfig(**SIGLIP_TEXT)),
            tokens(64),
            {"batch": 3, "sequence": 59},
            {"attention": 2},
            is_slow=True,
            weight="encoder.layers.1.mlp.fc1.weight",
        ),
    ]


def decoder_families() -> list[Family]:
    """Decoders whose hidden states are taken, as text-to-image models and embedders do."""
    return [
        decoder_like("llama", transformers.LlamaModel, RMS, is_slow=True),
        decoder_like("qwen2", transformers.Qwen2Model, RMS, is_slow=True),
        decoder_like(
            "qwen3",
            transformers.Qwen3Model,
            {"rms-norm": 9, "attention": 2, **SKIPS},
            is_slow=True,
            head_dim=16,
        ),
        decoder_like(
            "gemma2", transformers.Gemma2Model, {"rms-norm": 9, **SKIPS}, is_slow=True, **GEMMA
        ),
        decoder_like(
            "gemma3-text",
            transformers.Gemma3TextModel,
            {"rms-norm": 13, "attention": 2, **SKIPS},
            is_slow=True,
            **GEMMA,
        ),
    ]
