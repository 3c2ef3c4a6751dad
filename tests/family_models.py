"""One tiny model of each family that users export, saved as they have it on disk.

The sizes make what is particular of a family happen: windows are smaller than the sequence, key
and value heads are fewer than query heads, distances pass the last relative bucket.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from models import VOCABULARY, save
from small_unet import UNet, write_unet
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.sam.modeling_sam import SamVisionEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder

Sizes = tuple[int | str, ...]
BATCH = "batch 1..64"


def tokens(longest: int) -> dict[str, Sizes]:
    """What is derived of token ids and their mask."""
    return dict.fromkeys(("input_ids", "attention_mask"), (BATCH, f"sequence 1..{longest}"))


def image(height: int, width: int, channels: int = 3) -> dict[str, Sizes]:
    """What is derived of images."""
    return {"pixel_values": (BATCH, channels, height, width)}


@dataclass(frozen=True)
class Family:
    """One family: how its model is made, and what must come out of its export."""

    name: str
    model_class: type[nn.Module]
    make: Callable[[Path], Path]
    """Writes the model; a folder, or for `factory` a Python file."""
    inputs: Mapping[str, Sizes]
    """Inputs that must be derived, with their ranges."""
    other: Mapping[str, int]
    """Sizes of the dimensions in a run that neither the trace nor the verification saw."""
    fused: Mapping[str, int]
    """Fusions that must be in the engine."""
    is_slow: bool = False
    """Another family in the default run has its mechanisms."""
    factory: str | None = None
    """MODEL argument, where it is not the folder."""
    weight: str = ""
    """One element of it is changed to see that verification notices."""
    growth: float = 1.0
    """By how much, in units of the tensor's root mean square."""
    half: str = "verified-by-emulation"
    """Outcome of an fp16 export."""


def saved(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 1
) -> Callable[[Path], Path]:
    """A maker of a seeded, perturbed model in fp32."""
    return lambda folder: save(model_class, config, folder, torch.float32, seed)


TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_channels": 3, **HEADS}
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
WIDE = {"batch": 3, "sequence": 61}
FEW = {"batch": 5}


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


def t5_like(
    name: str, model_class: type[PreTrainedModel], *, is_slow: bool, **fields: object
) -> Family:
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
        is_slow,
        weight="encoder.block.1.layer.0.SelfAttention.o.weight",
    )


def named(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """The config of a part, as a config.json that names the part's class has it."""
    config.architectures = [model_class.__name__]
    return config


def clip_text() -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        **TEXT, **HEADS, max_position_embeddings=77, eos_token_id=VOCABULARY - 1
    )


CLIP_VISION = {**VISION, "image_size": 32, "patch_size": 8}
SIGLIP_TEXT = {**TEXT, **HEADS, "max_position_embeddings": 64, "projection_size": 32}
SIGLIP_VISION = {**VISION, "image_size": 24, "patch_size": 8}


def siglip() -> transformers.SiglipConfig:
    return transformers.SiglipConfig(text_config=SIGLIP_TEXT, vision_config=SIGLIP_VISION)


def whisper() -> transformers.WhisperConfig:
    """20 positions, so 40 frames, of 16 mel bins."""
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_source_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        architectures=["WhisperEncoder"],
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


def sam_vision() -> transformers.SamVisionConfig:
    """8 x 8 patches; the first layer sees windows of 3 x 3, padded, the second all."""
    return transformers.SamVisionConfig(
        **{key: value for key, value in VISION.items() if key != "intermediate_size"},
        mlp_dim=48,
        output_channels=24,
        image_size=32,
        patch_size=4,
        window_size=3,
        global_attn_indexes=[1],
        initializer_range=0.02,
        architectures=["SamVisionEncoder"],
    )


def segformer() -> transformers.SegformerConfig:
    """Three stages; the first two reduce keys and values by convolutions."""
    return transformers.SegformerConfig(
        num_encoder_blocks=3,
        depths=[1, 1, 1],
        sr_ratios=[4, 2, 1],
        hidden_sizes=[16, 24, 32],
        patch_sizes=[7, 3, 3],
        strides=[4, 2, 2],
        num_attention_heads=[1, 2, 4],
        mlp_ratios=[2, 2, 2],
        image_size=32,
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
        t5_like("t5", transformers.T5EncoderModel, is_slow=True),
        t5_like("mt5", transformers.MT5EncoderModel, is_slow=True, feed_forward_proj="gated-gelu"),
        t5_like("umt5", transformers.UMT5EncoderModel, is_slow=False),
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
            weight="encoder.layer.1.intermediate.dense.weight",
        ),
        Family(
            "modernbert",
            transformers.ModernBertModel,
            saved(transformers.ModernBertModel, modernbert()),
            tokens(80),
            WIDE,
            {"attention": 3},
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
            "qwen3", transformers.Qwen3Model, {"rms-norm": 9, "attention": 2, **SKIPS}, head_dim=16
        ),
        decoder_like("gemma2", transformers.Gemma2Model, {"rms-norm": 9, **SKIPS}, **GEMMA),
        decoder_like(
            "gemma3-text",
            transformers.Gemma3TextModel,
            {"rms-norm": 13, "attention": 2, **SKIPS},
            is_slow=True,
            **GEMMA,
        ),
    ]


def vision_families() -> list[Family]:
    """Encoders of images, and of sound as an image of frequencies."""
    return [
        Family(
            "vit",
            transformers.ViTModel,
            saved(
                transformers.ViTModel,
                transformers.ViTConfig(**VISION, image_size=(16, 24), patch_size=4),
            ),
            image(16, 24),
            FEW,
            {"attention": 2},
            is_slow=True,
            weight="layers.1.mlp.fc1.weight",
        ),
        Family(
            "clip-vision",
            transformers.CLIPVisionModel,
            saved(transformers.CLIPVisionModel, transformers.CLIPVisionConfig(**CLIP_VISION)),
            image(32, 32),
            FEW,
            {"attention": 2},
            is_slow=True,
            weight="encoder.layers.1.mlp.fc1.weight",
        ),
        Family(
            "siglip-vision",
            transformers.SiglipVisionModel,
            saved(transformers.SiglipVisionModel, transformers.SiglipVisionConfig(**SIGLIP_VISION)),
            image(24, 24),
            FEW,
            {"attention": 2},
            is_slow=True,
            weight="encoder.layers.1.mlp.fc1.weight",
        ),
        Family(
            "siglip",
            transformers.SiglipModel,
            saved(transformers.SiglipModel, siglip()),
            {
                "input_ids": tokens(64)["input_ids"],
                "pixel_values": image(24, 24)["pixel_values"],
                "attention_mask": tokens(64)["attention_mask"],
            },
            {"batch": 3, "sequence": 59},
            {"attention": 4},
            weight="vision_model.encoder.layers.1.mlp.fc1.weight",
        ),
        Family(
            "dinov2",
            transformers.Dinov2Model,
            saved(
                transformers.Dinov2Model,
                transformers.Dinov2Config(
                    hidden_size=32,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    image_size=42,
                    patch_size=14,
                    mlp_ratio=2,
                ),
            ),
            image(42, 42),
            FEW,
            {"attention": 2},
            is_slow=True,
            weight="encoder.layer.1.mlp.fc1.weight",
        ),
        Family(
            "dinov3",
            transformers.DINOv3ViTModel,
            saved(
                transformers.DINOv3ViTModel,
                transformers.DINOv3ViTConfig(
                    **VISION, image_size=32, patch_size=8, num_register_tokens=3
                ),
            ),
            image(32, 32),
            FEW,
            {"attention": 2},
            weight="layer.1.mlp.up_proj.weight",
        ),
        Family(
            "segformer",
            transformers.SegformerModel,
            saved(transformers.SegformerModel, segformer()),
            image(32, 32),
            FEW,
            {"attention": 3},
            weight="stages.1.blocks.0.mlp.fc2.weight",
        ),
        Family(
            "sam-vision",
            SamVisionEncoder,
            saved(SamVisionEncoder, sam_vision()),
            image(32, 32),
            FEW,
            {"attention": 2},
            weight="layers.1.mlp.lin1.weight",
        ),
        Family(
            "whisper-encoder",
            WhisperEncoder,
            saved(WhisperEncoder, whisper()),
            {"input_features": (BATCH, 16, 40)},
            FEW,
            {"attention": 2},
            weight="layers.1.fc1.weight",
        ),
        Family(
            "unet",
            UNet,
            write_unet,
            {
                "sample": (BATCH, 4, 16, 24),
                "timestep": (BATCH,),
                "text": (BATCH, 7, 24),
            },
            FEW,
            {"attention": 1},
            factory="unet_model:make",
            weight="middle.second.weight",
        ),
    ]


FAMILIES = [*text_families(), *decoder_families(), *vision_families()]
