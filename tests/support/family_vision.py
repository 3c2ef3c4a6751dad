"""Families that see images, or sound as an image of frequencies."""

import transformers
from family import BATCH, FEW, HEADS, TEXT, VISION, Family, image, saved, tokens
from models import VOCABULARY
from small_unet import UNet, write_unet
from transformers.models.sam.modeling_sam import SamVisionEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder

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
    )


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
            is_slow=True,
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
            is_slow=True,
            weight="layer.1.mlp.up_proj.weight",
        ),
        Family(
            "segformer",
            transformers.SegformerModel,
            saved(transformers.SegformerModel, segformer()),
            {"pixel_values": (BATCH, 3, "height 64..2048", "width 64..2048")},
            {"batch": 2, "height": 83, "width": 110},
            {"attention": 3},
            is_slow=True,
            weight="stages.1.blocks.0.mlp.fc2.weight",
        ),
        Family(
            "sam-vision",
            SamVisionEncoder,
            saved(SamVisionEncoder, sam_vision()),
            image(32, 32),
            FEW,
            {"attention": 2},
            is_slow=True,
            weight="layers.1.mlp.lin1.weight",
        ),
        Family(
            "whisper-encoder",
            WhisperEncoder,
            saved(WhisperEncoder, whisper()),
            {"input_features": (BATCH, 16, 40)},
            FEW,
            {"attention": 2},
            is_slow=True,
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
