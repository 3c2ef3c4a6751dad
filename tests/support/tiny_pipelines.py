"""Whole diffusion pipelines in small, of real classes, as `save_pretrained` writes them."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from cache_fixtures import VOCABULARY, add_t5_tokenizer, words_clip, words_t5
from cached_pipelines import byt5, gemma2, umt5, wide_t5
from models import save
from PIL import Image
from tiny_components import CONFIGS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    ByT5Tokenizer,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5EncoderModel,
    UMT5EncoderModel,
)

from enginecast.pipelines.generate import PROMPTS

CHAT = (
    "{% for one in messages %}{% if one.content is string %}{{ one.content }}{% else %}"
    "{% for part in one.content %}{{ part.text }}{% endfor %}{% endif %} {% endfor %}"
)
TEXT_TOKENS = 16
"""Longest text of the pipelines with a T5."""


@dataclass(frozen=True)
class Encoder:
    """A text encoder: how its folder is written, and its class."""

    write: Callable[[Path], Path]
    kind: Any
    tokenizer: Any = PreTrainedTokenizerFast


_QWEN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen3(folder: Path, kind: Any = Qwen3Model, layers: int = 2) -> Path:
    """Qwen3, with a template for chats that adds nothing."""
    config = Qwen3Config(
        **{**_QWEN, "num_hidden_layers": layers}, head_dim=8, architectures=[kind.__name__]
    )
    save(kind, config, folder, torch.float32, 8)
    return add_chat(folder)


def add_chat(folder: Path) -> Path:
    """A tokenizer of whole words, so that templates are about as long as for the real one, and with
    a template for chats that puts the texts one behind the other.
    """
    special = ["<pad>", "</s>", "<unk>"]
    words = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(PROMPTS))))
    vocabulary = {word: number for number, word in enumerate((*special, *words))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    end = ("</s>", special.index("</s>"))  # no text is empty, as with the templates of real ones
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[end])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT,
        **{"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    ).save_pretrained(folder)
    return folder


def mistral3(folder: Path) -> Path:
    """Mistral 3, of which pipelines use the text model; 4 layers."""
    config = Mistral3Config(
        text_config={**_QWEN, "model_type": "mistral", "num_hidden_layers": 4, "head_dim": 8},
        vision_config={
            **{"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "intermediate_size": 16, "image_size": 32},
            "patch_size": 8,
        },
        image_token_index=1,
        architectures=["Mistral3ForConditionalGeneration"],
    )
    save(Mistral3ForConditionalGeneration, config, folder, torch.float32, 10)
    return add_chat(folder)


ROPE = {"type": "mrope", "mrope_section": [2, 1, 1], "rope_theta": 1e4}


def qwen_vl(folder: Path) -> Path:
    """Qwen2.5-VL, of which pipelines use the text model."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = Qwen2_5_VLConfig(
        text_config={**_QWEN, "rope_parameters": ROPE},
        vision_config={**vision, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )
    save(Qwen2_5_VLForConditionalGeneration, config, folder, torch.float32, 9)
    return add_t5_tokenizer(folder)


def qwen_vl_text(folder: Path) -> Path:
    """The text model of Qwen2.5-VL by itself; 4 layers."""
    config = Qwen2_5_VLTextConfig(
        **{**_QWEN, "num_hidden_layers": 4, "rope_parameters": ROPE},
        architectures=["Qwen2_5_VLTextModel"],
    )
    save(Qwen2_5_VLTextModel, config, folder, torch.float32, 11)
    return add_chat(folder)


def gemma3(folder: Path) -> Path:
    """Gemma 3, of which pipelines use the text model."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Gemma3Config(
        text_config={**_QWEN, "head_dim": 8, "sliding_window": 16},
        vision_config={**vision, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        architectures=["Gemma3ForConditionalGeneration"],
    )
    save(Gemma3ForConditionalGeneration, config, folder, torch.float32, 13)
    return add_t5_tokenizer(folder)


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
QWEN3 = Encoder(qwen3, Qwen3Model)
QWEN3_LM = Encoder(lambda folder: qwen3(folder, Qwen3ForCausalLM, 4), Qwen3ForCausalLM)
MISTRAL3 = Encoder(mistral3, Mistral3ForConditionalGeneration)
GEMMA2 = Encoder(gemma2, Gemma2Model)
GEMMA3 = Encoder(gemma3, Gemma3ForConditionalGeneration)
QWEN_VL_TEXT = Encoder(qwen_vl_text, Qwen2_5_VLTextModel)
BYT5 = Encoder(byt5, T5EncoderModel, ByT5Tokenizer)
QWEN_VL_WORDS = Encoder(
    lambda folder: add_chat(qwen_vl(folder)), Qwen2_5_VLForConditionalGeneration
)
QWEN_VL = Encoder(qwen_vl, Qwen2_5_VLForConditionalGeneration)
Z_IMAGE: tuple[str, Mapping[str, Any]] = (
    "ZImageTransformer2DModel",
    {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 32,
        "axes_dims": [8, 4, 4],
        "axes_lens": [128, 32, 32],
    },
)
"""No row of `CONFIGS`: its inputs are known from recorded calls alone."""


@dataclass(frozen=True)
class Tiny:
    """A pipeline: its class, its components, and sizes that it makes."""

    kind: str
    models: Mapping[str, tuple[str, Mapping[str, Any]]]
    """By component: a name of `CONFIGS`, and what differs; or a class, and its config."""
    encoders: Mapping[str, Encoder]
    scheduler: Callable[[], Any]
    more: Mapping[str, Any]
    """Other components, or their classes, and settings of the pipeline."""
    sizes: Mapping[str, int]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the pipeline."""
    images: tuple[str, ...] = ()
    """Arguments that are images."""


def _flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


FLUX2 = {"in_channels": 16, "joint_attention_dim": 96}
VAE_FLUX2: tuple[str, Mapping[str, Any]] = (
    "AutoencoderKLFlux2",
    {
        "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D"],
        "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D"],
        "block_out_channels": [8, 16],
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
    },
)
WAN = {"text_dim": 32}
VAE_WAN: tuple[str, Mapping[str, Any]] = (
    "vae-wan",
    {
        "base_dim": 8,
        "dim_mult": [1, 1, 1, 1],
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    },
)
NONE = {"safety_checker": None, "feature_extractor": None}
SDXL_CONTROLNET: tuple[str, Mapping[str, Any]] = (
    "controlnet",
    {
        "cross_attention_dim": 64,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "attention_head_dim": [2, 4],
        "transformer_layers_per_block": [1, 2],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 72,
    },
)
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
    "qwen-image": Tiny(
        "QwenImagePipeline",
        {
            "transformer": ("qwen-image", {"joint_attention_dim": 32}),
            "vae": (
                "vae-qwen-image",
                {"base_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4},
            ),
        },
        {"text_encoder": QWEN_VL},
        _flow,
        {},
        {"height": 48, "width": 48},
    ),
    "z-image": Tiny(
        "ZImagePipeline",
        {"transformer": Z_IMAGE, "vae": ("vae", {"shift_factor": 0.1, "scaling_factor": 0.4})},
        {"text_encoder": QWEN3},
        _flow,
        {},
        {"height": 48, "width": 48},
    ),
    "flux2": Tiny(
        "Flux2Pipeline",
        {"transformer": ("flux2", FLUX2), "vae": VAE_FLUX2},
        {"text_encoder": MISTRAL3},
        _flow,
        {},
        {"height": 48, "width": 48},
        {"text_encoder_out_layers": [1, 2, 3], "max_sequence_length": 128},
    ),
    "flux2-klein": Tiny(
        "Flux2KleinPipeline",
        {"transformer": ("flux2", {**FLUX2, "guidance_embeds": False}), "vae": VAE_FLUX2},
        {"text_encoder": QWEN3_LM},
        _flow,
        {"is_distilled": False},
        {"height": 48, "width": 48},
        {"text_encoder_out_layers": [1, 2, 3]},
    ),
    "lumina2": Tiny(
        "Lumina2Pipeline",
        {
            "transformer": ("lumina2", {"cap_feat_dim": 32}),
            "vae": (
                "vae",
                {
                    **{"shift_factor": 0.1, "scaling_factor": 0.4},
                    "block_out_channels": [4, 4, 4, 4],
                    "down_block_types": ["DownEncoderBlock2D"] * 4,
                    "up_block_types": ["UpDecoderBlock2D"] * 4,
                },
            ),
        },
        {"text_encoder": GEMMA2},
        _flow,
        {},
        {"height": 64, "width": 64},
        {"max_sequence_length": 64},
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
        {"transformer": ("wan", WAN), "vae": VAE_WAN},
        {"text_encoder": UMT5},
        _flow,
        {},
        {"height": 48, "width": 48, "frames": 5},
    ),
    "wan22": Tiny(
        "WanPipeline",
        {"transformer": ("wan", WAN), "transformer_2": ("wan", WAN), "vae": VAE_WAN},
        {"text_encoder": UMT5},
        _flow,
        {"boundary_ratio": 0.875},
        {"height": 48, "width": 48, "frames": 5},
    ),
    "ltx": Tiny(
        "LTXPipeline",
        {"transformer": ("ltx", {"caption_channels": 32}), "vae": ("vae-ltx", {})},
        {"text_encoder": T5},
        _flow,
        {},
        {"height": 64, "width": 64, "frames": 9},
    ),
    "sana": Tiny(
        "SanaPipeline",
        {"transformer": ("sana", {"caption_channels": 32}), "vae": ("vae-dc", {})},
        {"text_encoder": GEMMA2},
        _flow,
        {},
        {"height": 64, "width": 64},
        {"complex_human_instruction": None, "max_sequence_length": 64},
    ),
    "hunyuan-video-15": Tiny(
        "HunyuanVideo15Pipeline",
        {
            "transformer": (
                "HunyuanVideo15Transformer3DModel",
                {
                    **{"in_channels": 9, "out_channels": 4, "num_attention_heads": 2},
                    **{"attention_head_dim": 16, "num_layers": 1, "num_refiner_layers": 1},
                    **{"text_embed_dim": 32, "text_embed_2_dim": 32, "image_embed_dim": 16},
                    **{"rope_axes_dim": (4, 6, 6), "target_size": 16, "task_type": "t2v"},
                },
            ),
            "vae": (
                "AutoencoderKLHunyuanVideo15",
                {
                    **{"latent_channels": 4, "block_out_channels": (32, 32)},
                    **{"layers_per_block": 1, "spatial_compression_ratio": 4},
                    **{"temporal_compression_ratio": 2, "downsample_match_channel": False},
                    "upsample_match_channel": False,
                },
            ),
        },
        {"text_encoder": QWEN_VL_TEXT, "text_encoder_2": BYT5},
        _flow,
        {"guider": diffusers.ClassifierFreeGuidance},
        {"height": 48, "width": 48, "frames": 5},
    ),
    "kandinsky5": Tiny(
        "Kandinsky5T2VPipeline",
        {
            "transformer": (
                "Kandinsky5Transformer3DModel",
                {
                    **{"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 32},
                    **{"in_text_dim2": 32, "time_dim": 32, "model_dim": 32, "ff_dim": 48},
                    **{"num_text_blocks": 1, "num_visual_blocks": 1, "axes_dims": (4, 6, 6)},
                },
            ),
            "vae": ("vae-hunyuan-video", {}),
        },
        {"text_encoder": QWEN_VL_WORDS, "text_encoder_2": CLIP},
        _flow,
        {},
        {"height": 64, "width": 64, "frames": 5},
        {"max_sequence_length": 64},
    ),
    "ltx2": Tiny(
        "LTX2Pipeline",
        {
            "transformer": (
                "LTX2VideoTransformer3DModel",
                {
                    **{"in_channels": 4, "out_channels": 4, "num_attention_heads": 2},
                    **{"attention_head_dim": 16, "cross_attention_dim": 32, "num_layers": 1},
                    **{"audio_in_channels": 4, "audio_out_channels": 4},
                    **{"audio_num_attention_heads": 2, "audio_attention_head_dim": 8},
                    **{"audio_cross_attention_dim": 16, "caption_channels": 32},
                    "rope_type": "split",
                },
            ),
            "vae": (
                "AutoencoderKLLTX2Video",
                {
                    **{"latent_channels": 4, "block_out_channels": (8,)},
                    **{"decoder_block_out_channels": (8,), "layers_per_block": (1,)},
                    **{"decoder_layers_per_block": (1, 1), "spatio_temporal_scaling": (True,)},
                    **{"decoder_spatio_temporal_scaling": (True,), "patch_size": 1},
                    **{"decoder_inject_noise": (False, False), "downsample_type": ("spatial",)},
                    **{"upsample_residual": (False,), "upsample_factor": (1,)},
                    "decoder_causal": False,
                },
            ),
            "audio_vae": (
                "AutoencoderKLLTX2Audio",
                {
                    **{"base_channels": 4, "ch_mult": (1,), "num_res_blocks": 1},
                    **{"resolution": 32, "latent_channels": 2, "mel_bins": 8},
                },
            ),
            "connectors": (
                "LTX2TextConnectors",
                {
                    **{"caption_channels": 32, "text_proj_in_factor": 3},
                    **{"video_connector_num_attention_heads": 4, "rope_type": "split"},
                    **{"video_connector_attention_head_dim": 8, "video_connector_num_layers": 1},
                    **{"audio_connector_num_attention_heads": 4, "rope_theta": 1e4},
                    **{"audio_connector_attention_head_dim": 8, "audio_connector_num_layers": 1},
                    **{"video_connector_num_learnable_registers": None},
                    **{"audio_connector_num_learnable_registers": None},
                    **{"connector_rope_base_seq_len": 32, "causal_temporal_positioning": False},
                },
            ),
            "vocoder": (
                "LTX2Vocoder",
                {
                    **{"in_channels": 16, "hidden_channels": 32, "out_channels": 2},
                    **{"upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]},
                    **{"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]]},
                },
            ),
        },
        {"text_encoder": GEMMA3},
        _flow,
        {},
        {"height": 64, "width": 64, "frames": 5},
        {"stg_scale": 0, "audio_stg_scale": 0, "modality_scale": 1, "audio_modality_scale": 1},
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


_SDXL, _FLUX = PIPELINES["sdxl"], PIPELINES["flux"]
PIPELINES = {
    **PIPELINES,
    "sdxl-img2img": replace(
        _SDXL,
        kind="StableDiffusionXLImg2ImgPipeline",
        arguments={"strength": 0.5},  # of three steps one is left
        images=("image",),
    ),
    "sdxl-inpaint": replace(
        _SDXL, kind="StableDiffusionXLInpaintPipeline", images=("image", "mask_image")
    ),
    "sdxl-controlnet": replace(
        _SDXL,
        kind="StableDiffusionXLControlNetPipeline",
        models={**_SDXL.models, "controlnet": SDXL_CONTROLNET},
        images=("image",),
    ),
    "flux-img2img": replace(_FLUX, kind="FluxImg2ImgPipeline", images=("image",)),
    "flux-inpaint": replace(_FLUX, kind="FluxInpaintPipeline", images=("image", "mask_image")),
}


def image_options(name: str, folder: Path) -> list[str]:
    """What `diffusers export` and `run` are given for the images of a pipeline, drawn and written
    into a folder.
    """
    found, sizes = [], PIPELINES[name].sizes
    for number, argument in enumerate(PIPELINES[name].images):
        shape = sizes["height"], sizes["width"], 3
        pixels = torch.randint(256, shape, generator=torch.Generator().manual_seed(number))
        if argument == "mask_image":  # the left half
            pixels = (torch.arange(shape[1]) < shape[1] // 2)[None, :, None].expand(shape) * 255
        file = folder / f"{argument}.png"
        Image.fromarray(pixels.byte().numpy()).save(file)
        found.append(f"--image={argument}={file}")
    return found


def asked(name: str) -> tuple[str, ...]:
    """What `enginecast diffusers export` is asked for."""
    sizes = PIPELINES[name].sizes.items()
    own = (f"{argument}={json.dumps(value)}" for argument, value in arguments(name).items())
    return (
        *(part for size, value in sizes for part in (f"--{size}", str(value))),
        *(part for each in own for part in ("--set", each)),
    )


def arguments(name: str) -> Mapping[str, Any]:
    """Arguments of the pipeline besides sizes: Qwen-Image's own text before a prompt is longer."""
    encoders = PIPELINES[name].encoders.values()
    has_length = any(
        one not in (CLIP, CLIP_PROJECTED, QWEN_VL, QWEN_VL_WORDS, QWEN_VL_TEXT, BYT5)
        for one in encoders
    )
    own = {"max_sequence_length": TEXT_TOKENS} if has_length else {}
    return {**own, **PIPELINES[name].arguments}


def save_pipeline(name: str, folder: Path, **options: Any) -> Path:
    """Write a pipeline as `save_pretrained` does, with seeded weights."""
    tiny = PIPELINES[name]
    parts: dict[str, Any] = {"scheduler": tiny.scheduler()}
    for seed, (part, (config, changes)) in enumerate(tiny.models.items()):
        torch.manual_seed(seed)
        kind, settings = CONFIGS.get(config, (config, {}))
        owner = diffusers if hasattr(diffusers, kind) else diffusers.pipelines.ltx2
        parts[part] = getattr(owner, kind)(**{**settings, **changes})
    for part, encoder in tiny.encoders.items():
        made = encoder.write(folder.with_name(f"{folder.name}-{part}"))
        parts[part] = encoder.kind.from_pretrained(made)
        tokenizer = encoder.tokenizer.from_pretrained(made)
        parts[part.replace("text_encoder", "tokenizer")] = tokenizer
    more = {name: one() if isinstance(one, type) else one for name, one in tiny.more.items()}
    pipe = getattr(diffusers, tiny.kind)(**parts, **more)
    pipe.save_pretrained(folder, **options)
    return folder
