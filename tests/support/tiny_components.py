"""Tiny components of diffusion pipelines, a config for each class whose inputs are known."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
_UP = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
_SDXL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 2),
    "projection_class_embeddings_input_dim": 80,
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}

CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sd15-unet": ("UNet2DConditionModel", {**_UNET, **_UP}),
    "sdxl-unet": (
        "UNet2DConditionModel",
        {**_UNET, **_SDXL, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
    ),
    "unet-2d": (
        "UNet2DModel",
        {
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "attention_head_dim": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
    ),
    "controlnet": (
        "ControlNetModel",
        {
            **{name: value for name, value in _UNET.items() if name != "sample_size"},
            "conditioning_embedding_out_channels": (4, 8),
        },
    ),
    "vae": (
        "AutoencoderKL",
        {
            "sample_size": 16,
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
    ),
    "vae-tiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
    ),
    "vae-dc": (
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 4,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
        },
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {
            **_HEADS,
            "num_layers": 1,
            "in_channels": 4,
            "cross_attention_dim": 16,
            "sample_size": 8,
            "patch_size": 2,
            "caption_channels": 8,
            "use_additional_conditions": False,
        },
    ),
    "dit": (
        "DiTTransformer2DModel",
        {
            **_HEADS,
            "num_layers": 1,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 10,
        },
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
            "guidance_embeds": True,
        },
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 32,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": (4, 4, 4, 4),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **_HEADS,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 64,
            "out_channels": 4,
            "pos_embed_max_size": 32,
        },
    ),
    "sana": (
        "SanaTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 4,
            "num_layers": 1,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 4,
            "cross_attention_dim": 8,
            "caption_channels": 8,
            "sample_size": 8,
            "patch_size": 1,
        },
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (128, 128, 128),
            "cap_feat_dim": 8,
        },
    ),
    "qwen-image": (
        "QwenImageTransformer2DModel",
        {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
    ),
    "wan": (
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 1,
            "rope_max_seq_len": 64,
        },
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "num_layers": 1,
            "caption_channels": 16,
        },
    ),
    "cogvideox-2b": (
        "CogVideoXTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "num_layers": 1,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": 8,
        },
    ),
    "cogvideox-5b": (
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "num_layers": 1,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": 8,
            "use_rotary_positional_embeddings": True,
        },
    ),
    "hunyuan-video": (
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
        },
    ),
    "mochi": (
        "MochiTransformer3DModel",
        {
            **_HEADS,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 16,
        },
    ),
    "allegro": (
        "AllegroTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 24,
            "num_layers": 1,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 3,
            "caption_channels": 8,
        },
    ),
    "latte": (
        "LatteTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": 8,
            "video_length": 3,
        },
    ),
    "vae-wan": (
        "AutoencoderKLWan",
        {
            "base_dim": 3,
            "z_dim": 4,
            "dim_mult": [1, 1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True],
        },
    ),
    "vae-qwen-image": (
        "AutoencoderKLQwenImage",
        {
            "base_dim": 3,
            "z_dim": 4,
            "dim_mult": [1, 1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True],
        },
    ),
    "vae-cogvideox": (
        "AutoencoderKLCogVideoX",
        {
            "down_block_types": ("CogVideoXDownBlock3D",) * 3,
            "up_block_types": ("CogVideoXUpBlock3D",) * 3,
            "block_out_channels": (4, 4, 4),
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 2,
        },
    ),
    "vae-ltx": (
        "AutoencoderKLLTXVideo",
        {
            "latent_channels": 4,
            "block_out_channels": (4, 4, 4, 4),
            "decoder_block_out_channels": (4, 4, 4, 4),
            "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1, 1, 1),
            "spatio_temporal_scaling": (True, True, False, False),
            "decoder_spatio_temporal_scaling": (True, True, False, False),
            "patch_size": 1,
        },
    ),
    "vae-hunyuan-video": (
        "AutoencoderKLHunyuanVideo",
        {
            "latent_channels": 4,
            "block_out_channels": (4, 4, 4, 4),
            "layers_per_block": 1,
            "norm_num_groups": 2,
        },
    ),
    "vae-mochi": (
        "AutoencoderKLMochi",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (32, 32, 32),  # in 32 groups
            "decoder_block_out_channels": (32, 32, 32),
            "layers_per_block": (1, 1, 1, 1),
            "temporal_expansions": (1, 2),
            "spatial_expansions": (2, 2),
        },
    ),
}


def save(name: str, folder: Path, seed: int = 0, **more: Any) -> Path:
    """Write a component as `save_pretrained` does, with seeded weights."""
    torch.manual_seed(seed)
    kind, config = CONFIGS[name]
    getattr(diffusers, kind)(**config).save_pretrained(folder, **more)
    return folder
