"""Tiny transformers of diffusers that get a mask of the text, each with inputs that fit it."""

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from torch import Tensor, nn

BATCH, LENGTH, REAL, WIDTH = 2, 12, 5, 8
ONES = torch.ones(BATCH)


def pixart(text: Tensor, mask: Tensor) -> Any:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
    ), {
        "hidden_states": torch.ones(BATCH, 4, 8, 8),
        "timestep": ONES,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask,
    }


def sana(text: Tensor, mask: Tensor) -> Any:
    return diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        sample_size=8,
    ), {
        "hidden_states": torch.ones(BATCH, 4, 8, 8),
        "timestep": ONES,
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask,
    }


def ltx(text: Tensor, mask: Tensor) -> Any:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=WIDTH,
    ), {
        "hidden_states": torch.ones(BATCH, 32, 4),
        "timestep": ONES,
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask.bool(),
    }


def mochi(text: Tensor, mask: Tensor) -> Any:
    return diffusers.MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=WIDTH,
        time_embed_dim=4,
        max_sequence_length=LENGTH,
    ), {
        "hidden_states": torch.ones(BATCH, 4, 2, 8, 8),
        "timestep": ONES,
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask.bool(),
    }


def lumina2(text: Tensor, mask: Tensor) -> Any:
    return diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 64, 64),
        cap_feat_dim=WIDTH,
    ), {
        "hidden_states": torch.ones(BATCH, 4, 8, 8),
        "timestep": ONES,
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask,
    }


def hunyuan_video(text: Tensor, mask: Tensor) -> Any:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    ), {
        "hidden_states": torch.ones(BATCH, 4, 1, 8, 8),
        "timestep": ONES,
        "pooled_projections": torch.ones(BATCH, 8),
        "guidance": ONES,
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask,
    }


def allegro(text: Tensor, mask: Tensor) -> Any:
    return diffusers.AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        cross_attention_dim=24,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        caption_channels=WIDTH,
    ), {
        "hidden_states": torch.ones(BATCH, 4, 2, 8, 8),
        "timestep": ONES,
        "attention_mask": torch.ones(BATCH, 2, 8, 8),
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask,
    }


def chroma(text: Tensor, mask: Tensor) -> Any:
    return diffusers.ChromaTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=1,
    ), {
        "hidden_states": torch.ones(BATCH, 16, 4),
        "timestep": ONES,
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(LENGTH, 3),
        "encoder_hidden_states": text,
        # As `_prepare_attention_mask` makes it of the float mask that `encode_prompt` returns.
        "attention_mask": torch.cat([mask.float(), torch.ones(BATCH, 16)], dim=1),
    }


def hunyuan_video_15(text: Tensor, mask: Tensor) -> Any:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        image_embed_dim=WIDTH,
        rope_axes_dim=(2, 4, 4),
    ), {
        "hidden_states": torch.ones(BATCH, 4, 1, 8, 8),
        "timestep": ONES,
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": text,
        "encoder_attention_mask_2": mask,
        "image_embeds": torch.zeros(BATCH, 3, WIDTH),
    }


def krea2(text: Tensor, mask: Tensor) -> Any:
    return diffusers.Krea2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        attention_head_dim=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        timestep_embed_dim=8,
        text_hidden_dim=WIDTH // 2,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=8,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 4, 4),
    ), {
        "hidden_states": torch.ones(BATCH, 16, 4),
        "encoder_hidden_states": text.unflatten(2, (2, WIDTH // 2)),
        "timestep": ONES,
        "position_ids": torch.zeros(LENGTH + 16, 3),
        "encoder_attention_mask": mask.bool(),
    }


def qwen_image(text: Tensor, mask: Tensor) -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=12,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 4, 4),
    ), {
        "hidden_states": torch.ones(BATCH, 16, 16),
        "encoder_hidden_states": text,
        "encoder_hidden_states_mask": mask,
        "timestep": ONES,
        "img_shapes": [[(1, 4, 4)]] * BATCH,
    }


class Connected(nn.Module):
    """The connectors of LTX-2, which read all hidden states of the text encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.connectors = LTX2TextConnectors(
            caption_channels=WIDTH // 2,
            text_proj_in_factor=2,
            video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=WIDTH // 4,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=LENGTH,
            audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=WIDTH // 4,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=LENGTH,
        )

    def forward(self, text: Tensor, mask: Tensor, return_dict: bool) -> Any:
        return self.connectors(text, mask, padding_side="right")


def ltx2(text: Tensor, mask: Tensor) -> Any:
    return Connected(), {"text": text, "mask": mask}


DENOISERS: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "allegro": allegro,
    "chroma": chroma,
    "hunyuan-video": hunyuan_video,
    "hunyuan-video-15": hunyuan_video_15,
    "krea2": krea2,
    "ltx": ltx,
    "ltx2": ltx2,
    "lumina2": lumina2,
    "mochi": mochi,
    "pixart-alpha": pixart,
    "pixart-sigma": pixart,
    "qwen-image": qwen_image,
    "sana": sana,
}
"""A model and its keywords, given text [BATCH, LENGTH, WIDTH] and mask int64 [BATCH, LENGTH]."""
