"""Whole diffusion pipelines in small, of real classes, as `save_pretrained` writes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from cache_fixtures import words_clip, words_t5
from cached_pipelines import umt5, wide_t5
from tiny_components import CONFIGS
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5EncoderModel,
    UMT5EncoderModel,
)

Parts = dict[str, Any]
TEXT_TOKENS = 16
"""Longest text of the pipelines with a T5."""


@dataclass(frozen=True)
class Encoder:
    """A text encoder: how its folder is written, and its class."""

    write: Callable[[Path], Path]
    kind: Any


CLIP = Encoder(words_clip, CLIPTextModel)
CLIP_PROJECTED = Encoder(
    lambda folder: words_clip(folder, projection=True), CLIPTextModelWithProjection
)
CLIP_PROJECTED_2 = Encoder(
    lambda folder: words_clip(folder, projection=True, seed=7), CLIPTextModelWithProjection
)
T5 = Encoder(words_t5, T5EncoderModel)
WIDE_T5 = Encoder(wide_t5, T5EncoderModel)
UMT5 = Encoder(umt5, UMT5EncoderModel)


@dataclass(frozen=True)
class Tiny:
    """A pipeline: its class, its components, and sizes that it makes."""

    kind: str
    models: Mapping[str, tuple[str, Mapping[str, Any]]]
    """By component: a name of `CONFIGS`, and what differs."""
    encoders: Mapping[str, Encoder]
    scheduler: Callable[[], Any]
    more: Mapping[str, Any]
    """Other components and settings of the pipeline."""
    sizes: Mapping[str, int]


def _flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


NONE = {"safety_checker": None, "feature_extractor": None}
PIPELINES: Mapping[str, Tiny] = {
    "sd15": Tiny(
        "StableDiffusionPipeline",
        {"unet": ("sd15-unet", {"cross_attention_dim": 32}), "vae": ("vae", {})},
        {"text_encoder": CLIP},
        lambda: diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        {**NONE, "requires_safety_checker": False},
        {"height": 48, "width": 48},
    ),
    "sdxl": Tiny(
        "StableDiffusionXLPipeline",
        {
            "unet": (
                "sdxl-unet",
                {"cross_attention_dim": 64, "projection_class_embeddings_input_dim": 72},
            ),
            "vae": ("vae", {}),
        },
        {"text_encoder": CLIP, "text_encoder_2": CLIP_PROJECTED},
        diffusers.EulerDiscreteScheduler,
        {},
        {"height": 48, "width": 48},
    ),
    "pixart": Tiny(
        "PixArtSigmaPipeline",
        {"transformer": ("pixart", {"caption_channels": 32}), "vae": ("vae", {})},
        {"text_encoder": T5},
        diffusers.DPMSolverMultistepScheduler,
        {},
        {"height": 48, "width": 48},
    ),
    "flux": Tiny(
        "FluxPipeline",
        {
            "transformer": ("flux", {"in_channels": 16, "guidance_embeds": False}),
            "vae": ("vae", {"shift_factor": 0.1, "scaling_factor": 0.4}),
        },
        {"text_encoder": CLIP, "text_encoder_2": T5},
        _flow,
        {},
        {"height": 48, "width": 48},
    ),
    "sd3": Tiny(
        "StableDiffusion3Pipeline",
        {
            "transformer": ("sd3", {"joint_attention_dim": 64, "pooled_projection_dim": 48}),
            "vae": ("vae", {"shift_factor": 0.1, "scaling_factor": 0.4}),
        },
        {
            "text_encoder": CLIP_PROJECTED,
            "text_encoder_2": CLIP_PROJECTED_2,
            "text_encoder_3": WIDE_T5,
        },
        _flow,
        {},
        {"height": 48, "width": 48},
    ),
    "wan": Tiny(
        "WanPipeline",
        {
            "transformer": ("wan", {"text_dim": 32}),
            "vae": (
                "vae-wan",
                {
                    "dim_mult": [1, 1, 1, 1],
                    "temperal_downsample": [False, True, True],
                    "latents_mean": [0.0] * 4,
                    "latents_std": [1.0] * 4,
                },
            ),
        },
        {"text_encoder": UMT5},
        _flow,
        {},
        {"height": 48, "width": 48, "frames": 5},
    ),
    "cogvideox": Tiny(
        "CogVideoXPipeline",
        {
            "transformer": (
                "cogvideox-2b",
                {"text_embed_dim": 32, "max_text_seq_length": TEXT_TOKENS},
            ),
            "vae": (
                "vae-cogvideox",
                {
                    "block_out_channels": (4, 4, 4, 4),
                    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
                    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
                },
            ),
        },
        {"text_encoder": T5},
        diffusers.CogVideoXDDIMScheduler,
        {},
        {"height": 64, "width": 64, "frames": 9},
    ),
}


def asked(name: str) -> tuple[str, ...]:
    """What `enginecast diffusers export` is asked for."""
    tiny = PIPELINES[name]
    has_length = any(encoder in (T5, WIDE_T5, UMT5) for encoder in tiny.encoders.values())
    sizes = [part for size, value in tiny.sizes.items() for part in (f"--{size}", str(value))]
    return (*sizes, *(("--set", f"max_sequence_length={TEXT_TOKENS}") if has_length else ()))


def save_pipeline(name: str, folder: Path, **more: Any) -> Path:
    """Write a pipeline as `save_pretrained` does, with seeded weights."""
    tiny = PIPELINES[name]
    parts: dict[str, Any] = {"scheduler": tiny.scheduler()}
    for seed, (part, (config, changes)) in enumerate(tiny.models.items()):
        torch.manual_seed(seed)
        kind, settings = CONFIGS[config]
        parts[part] = getattr(diffusers, kind)(**{**settings, **changes})
    for part, encoder in tiny.encoders.items():
        made = encoder.write(folder.with_name(f"{folder.name}-{part}"))
        parts[part] = encoder.kind.from_pretrained(made)
        parts[part.replace("text_encoder", "tokenizer")] = PreTrainedTokenizerFast.from_pretrained(
            made
        )
    pipe = getattr(diffusers, tiny.kind)(**parts, **tiny.more)
    pipe.save_pretrained(folder, **more)
    return folder
