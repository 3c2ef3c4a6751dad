"""What the rules of `shrink` cannot know, by model type: fields of the tiny config.

Dotted names reach into sub-configs.  This is data of the test; the product has no such table.
"""

from typing import Any

_NO_TIMM = {
    "use_timm_backbone": False,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16, 32, 64],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    },
    "backbone": None,
    "use_pretrained_backbone": False,
    "backbone_kwargs": None,
}
_INDEXED = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}

_EFFICIENT = {
    "in_channels": [32, 16, 24, 40, 80, 112, 192],
    "out_channels": [16, 24, 40, 80, 112, 192, 320],
    "hidden_dim": 1280,
    "width_coefficient": 1.0,
    "depth_coefficient": 0.3,
    "image_size": 64,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "resolution": 32}

OVERRIDES: dict[str, dict[str, Any]] = {
    "align": {f"vision_config.{name}": value for name, value in _EFFICIENT.items()},
    "efficientnet": _EFFICIENT,
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "granite_speech5_encoder": {"context_size": 16},
    "granite_speech5_ctc": {"encoder_config.context_size": 16},
    "janus": {f"vq_config.{name}": value for name, value in _VQ.items()},
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {
        **{f"vq_config.{name}": value for name, value in _VQ.items()},
        "vocabulary_map": {"<image>": 120, "IMGIMGBZ": 121},
    },
    "emu3": {"vocabulary_map": {"<image>": 120}},
    "conditional_detr": _NO_TIMM,
    "dab-detr": _NO_TIMM,
    "detr": _NO_TIMM,
    "table-transformer": _NO_TIMM,
    "deformable_detr": {
        **_NO_TIMM,
        "backbone_config": {
            **_NO_TIMM["backbone_config"],  # type: ignore[dict-item]
            "out_features": ["stage2", "stage3", "stage4"],
        },
    },
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "qwen4_exp_text": _INDEXED,
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXED.items()},
    "videoprism": {"vision_config.image_size": 36, "vision_config.num_frames": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
}
