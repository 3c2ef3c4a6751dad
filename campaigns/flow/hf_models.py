"""Small transformers models whose code branches, or whose heads are dense."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from models import VOCABULARY, llama_config, save
from transformers.models.eomt import modeling_eomt
from transformers.models.mask2former import modeling_mask2former
from zoo.tiny import candidates

Make = Callable[[Path], Path]
"""Saves a model in a folder; returns the folder."""


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    return save(model_class, config, folder, torch.float32, 0)


def _build_losses_without_scipy() -> None:
    """These classes build their loss with the model and want scipy for it; no loss is computed."""
    for module in (modeling_eomt, modeling_mask2former):
        module.requires_backends = lambda *_: None


def dynamic_rope(folder: Path) -> Path:
    """Frequencies that change once a text is longer than 32 tokens."""
    config = llama_config()
    config.max_position_embeddings = 32
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return _save(transformers.LlamaModel, config, folder)


def long_rope(folder: Path) -> Path:
    """Phi-3 as Phi-4-mini has it: other factors once a text is longer than 32 tokens."""
    config = transformers.Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.5, 3.0, 4.0],
        },
        architectures=["Phi3Model"],
    )
    return _save(transformers.Phi3Model, config, folder)


def eomt(folder: Path) -> Path:
    """Its last blocks mask attention where a buffer says so."""
    _build_losses_without_scipy()
    config = transformers.EomtConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=32,
        patch_size=4,
        num_upscale_blocks=1,
        num_blocks=2,
        num_queries=6,
        num_register_tokens=2,
        num_labels=5,
        architectures=["EomtForUniversalSegmentation"],
    )
    return _save(transformers.EomtForUniversalSegmentation, config, folder)


def dense(model_type: str, class_name: str, **fields: Any) -> Make:
    """The model of a type in small, with another class than the base, and these fields."""

    def make(folder: Path) -> Path:
        _build_losses_without_scipy()
        config = next(candidates(model_type))
        config.architectures = [class_name]
        for name, value in fields.items():
            setattr(config, name, value)
        return _save(getattr(transformers, class_name), config, folder)

    return make


def mixtral(folder: Path) -> Path:
    """Four experts, of which each token takes two."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        architectures=["MixtralModel"],
    )
    return _save(transformers.MixtralModel, config, folder)


HF_MODELS: Mapping[str, Make] = {
    "llama with dynamic RoPE": dynamic_rope,
    "phi3 with longrope": long_rope,
    "EoMT segmentation": eomt,
    "Mask2Former segmentation": dense("mask2former", "Mask2FormerForUniversalSegmentation"),
    "DETR detection": dense("detr", "DetrForObjectDetection"),
    "Segformer segmentation": dense("segformer", "SegformerForSemanticSegmentation"),
    "DPT depth": dense(
        "dpt", "DPTForDepthEstimation", num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3]
    ),
}
MIXTURES: Mapping[str, Make] = {
    "mixtral": mixtral,
    "qwen3-moe": dense("qwen3_moe", "Qwen3MoeModel"),
    "olmoe": dense("olmoe", "OlmoeModel"),
    "gpt-oss": dense("gpt_oss", "GptOssModel", hidden_size=96, intermediate_size=96),
    "deepseek-v3": dense("deepseek_v3", "DeepseekV3Model"),
}
