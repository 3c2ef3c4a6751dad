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
_SERIES = {"prediction_length": 8, "num_time_features": 2, "feature_size": 11}
_HIERA = {"blocks_per_stage": [1, 1, 2, 1], "global_attention_blocks": [3]}
_SAM2_VISION = {
    **{f"backbone_config.{name}": value for name, value in _HIERA.items()},
    "backbone_config.image_size": [256, 256],
    "backbone_feature_sizes": [[64, 64], [32, 32], [16, 16]],
}
_SAM2 = {
    **{f"vision_config.{name}": value for name, value in _SAM2_VISION.items()},
    "prompt_encoder_config.image_size": 256,
}
_LCNET_STAGES = {
    "backbone_config.stem_channels": [3, 16, 32],
    "backbone_config.block_configs": [
        [[3, 32, 32, 1, True]],
        [[3, 32, 48, 2, False]],
        [[3, 48, 64, 2, False], [3, 64, 64, 1, True]],
        [[3, 64, 96, 2, True]],
    ],
    "backbone_config.depths": [1, 1, 2, 1],
    "backbone_config.stage_out_channels": [32, 48, 64, 96],
    "backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"],
    "backbone_config.out_indices": [1, 2, 3, 4],
}
"""Maps of four sizes, each half the one before, as detectors of text upsample them."""
_INTRACLASS = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{
        f"{name}_{ratio}ratio": [
            [k if high else 1, k if wide else 1],
            1,
            [k // 2 * high, k // 2 * wide],
        ]
        for ratio, k in (("long", 7), ("mid", 5), ("short", 3))
        for name, high, wide in (
            ("vertical_long_to_small_conv", 1, 0),
            ("horizontal_small_to_long_conv", 0, 1),
            ("symmetric_conv_long", 1, 1),
        )
    },
}
"""Kernel, stride and padding of each convolution, as PaddleOCR configures them."""
_LCNET = {
    "backbone_config.stem_channels": [3, 48, 96],
    "backbone_config.depths": [1, 2, 7, 3],
    "backbone_config.stage_out_channels": [96, 96, 192, 384],
}
_OMNI = {"vision_start_token_id": 100, "vision_end_token_id": 101, "audio_start_token_id": 102}
_SLIDING = {
    "per_layer_config": {
        "1": {
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 6,
        }
    }
}
_QUARTERED = {
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 4, 4, 4],
    },
}
_PERCEPTION = {
    "architecture": "vit_pe_core_large_patch14_336",
    "model_args": {
        "depth": 2,
        "embed_dim": 64,
        "num_heads": 4,
        "attn_pool_num_heads": 4,
        "img_size": [56, 56],
        "ref_feat_shape": [4, 4],
    },
}
"""A small one of the towers that are created by timm, from arguments of its own."""
_FRAMES = {f"vision_config.{name}": value for name, value in _PERCEPTION.items()}
_REPVIT = {
    "backbone_config.architecture": "repvit_m1",
    "backbone_config.model_args": {
        "in_chans": 3,
        "features_only": True,
        "out_indices": [0, 1, 2, 3],
        "embed_dim": [8, 16, 32, 64],
        "depth": [1, 1, 2, 1],
    },
    "backbone_channel_list": [64, 32, 16, 8],
    "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
}
_EDGETAM = {
    **{f"vision_config.{name}": value for name, value in _REPVIT.items()},
    "prompt_encoder_config.image_size": 128,
}
_MOBILENET = {
    "architecture": "mobilenetv5_300m_enc",
    "hidden_size": 2048,
    "model_args": {"channel_multiplier": 0.1, "msfa_output_resolution": 4},
}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "resolution": 32}

OVERRIDES: dict[str, dict[str, Any]] = {
    "edgetam_vision_model": _REPVIT,
    "edgetam": _EDGETAM,
    "edgetam_video": {
        "vision_config": {"model_type": "edgetam_vision_model", "fpn_hidden_size": 32},
        "vision_config.backbone_config": {"model_type": "timm_wrapper", "num_classes": 2},
        **_EDGETAM,
        "image_size": 128,
    },
    "fast_vlm": {
        "vision_config.hidden_size": 256,
        "vision_config.model_args": {
            "inference_mode": True,
            "layers": [1, 1, 1, 1, 1],
            "embed_dims": [8, 16, 32, 64, 128],
        },
        "image_seq_length": 4,
    },
    # Random weights draw out a token to 20 frames, and up to 60.
    "fastspeech2_conformer": {"speaking_speed": 0.1},
    "gemma3n_vision": _MOBILENET,
    "gemma3n": {
        **{f"vision_config.{name}": value for name, value in _MOBILENET.items()},
        "vision_soft_tokens_per_image": 16,
        "audio_soft_tokens_per_image": 8,
        "text_config.vocab_size": 512,
        "text_config.vocab_size_per_layer_input": 256,
        "vision_config.vocab_offset": 256,
        "audio_config.vocab_offset": 384,
        "image_token_id": 257,
        "audio_token_id": 385,
    },
    "pe_video_encoder": _FRAMES,
    "pe_video": {f"video_config.{name}": value for name, value in _FRAMES.items()},
    "pe_audio_video_encoder": {f"video_config.{n}": value for n, value in _FRAMES.items()},
    "pe_audio_video": {
        f"audio_video_config.video_config.{name}": value for name, value in _FRAMES.items()
    },
    "perception_lm": {
        "vision_config.architecture": _PERCEPTION["architecture"],
        "vision_config.model_args": {
            **_PERCEPTION["model_args"],  # type: ignore[dict-item]
            "global_pool": "",
            "use_post_transformer_norm": False,
            "init_values": 0.1,
        },
    },
    "timm_backbone": {"backbone": "mobilenetv3_small_050", "out_indices": [1, 2, 3]},
    "timm_wrapper": {"architecture": "mobilenetv3_small_050"},
    "align": {
        **{f"vision_config.{name}": value for name, value in _EFFICIENT.items()},
        "projection_dim": 320,
    },
    "efficientnet": _EFFICIENT,
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "longcat_flash": {"zero_expert_num": 4},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granite_speech5_encoder": {"context_size": 16},
    "granite_speech5_ctc": {"encoder_config.context_size": 16},
    "janus": {f"vq_config.{name}": value for name, value in _VQ.items()},
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
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
    "blip-2": {"image_token_id": 120, "image_token_index": 120},
    "instructblip": {"image_token_index": 120},
    "instructblipvideo": {"video_token_index": 120},
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8},
    "deepseek_ocr2": {
        "text_config.moe_intermediate_size": 64,
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
    },
    "diffusion_gemma": {
        "canvas_length": 8,
        "text_config.num_experts": 8,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 32,
    },
    "donut-swin": {"window_size": 2},
    "swin": {"window_size": 2},
    "dots3_note_text": _SLIDING,
    "dots3_note": {
        **{f"text_config.{name}": value for name, value in _SLIDING.items()},
        "audio_config.adapter_input_size": 40,
    },
    "efficientloftr": {
        "stage_num_blocks": [1, 1, 1, 1],
        "out_features": [64, 64, 128, 256],
        "hidden_size": 256,
        "stage_in_channels": [1, 64, 64, 128],
        "stage_block_stride": [[2], [1], [2], [2]],
        "stage_block_out_channels": [[64], [64], [128], [256]],
        "stage_block_in_channels": [[1], [64], [64], [128]],
        "fine_fusion_dims": [256, 128, 64],
        "intermediate_size": 512,
        "num_attention_layers": 1,
    },
    "ernie4_5_vl_moe": {
        "text_config.hidden_size": 128,
        "text_config.num_attention_heads": 4,
        "text_config.num_key_value_heads": 2,
        "text_config.rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 6, 4],
        },
    },
    "hunyuan_vl_text": _QUARTERED,
    "hunyuan_vl": {f"text_config.{name}": value for name, value in _QUARTERED.items()},
    "inkling2": {"quantization_config": None},
    "kimi_k25": {
        "vision_config.hidden_size": 64,
        "vision_config.num_attention_heads": 4,
        "vision_config.pos_emb_width": 64,
    },
    "kimi_k25_vision": {"hidden_size": 64, "num_attention_heads": 4, "pos_emb_width": 64},
    "higgs_audio_v2_tokenizer": {
        "acoustic_model_config.downsampling_ratios": [8, 5, 4, 2, 3],
        "acoustic_model_config.upsampling_ratios": [8, 5, 4, 2, 3],
        "acoustic_model_config.hop_length": 960,
    },
    "omdet-turbo": {
        "image_size": 128,
        "backbone_config": {
            "model_type": "swin",
            "image_size": 128,
            "embed_dim": 12,
            "depths": [1, 1, 1, 1],
            "num_heads": [3, 6, 12, 24],
            "window_size": 4,
            "out_indices": [2, 3, 4],
        },
        "apply_layernorm_after_vision_backbone": False,
    },
    "clvp": {
        "speech_config.vocab_size": 256,
        "speech_config.num_attention_heads": 3,
        "text_config.num_attention_heads": 3,
    },
    "lw_detr": {
        "num_feature_levels": 1,
        "projector_in_channels": [32],
        "projector_scale_factors": [1.0],
        "backbone_config.image_size": 256,
        "backbone_config.out_indices": [1, 2],
    },
    "nemo_speechlm": {
        "text_config.layers_block_type": ["linear_attention", "moe", "full_attention"],
    },
    "mlcd": {"num_attention_heads": 8},
    "mlcd_vision_model": {"num_attention_heads": 8},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "muse_spark": {"audio_config.num_hidden_layers": 4},
    "muse_spark_vision": {"pos_emb_width": 32},
    "muse_glimmer_vision": {"pos_emb_width": 32},
    "fastspeech2_conformer_with_hifigan": {
        "model_config.speaking_speed": 0.02,
        "vocoder_config.model_in_dim": 80,
        "vocoder_config.upsample_initial_channel": 32,
    },
    "bros": {
        "hidden_size": 192,
        "dim_bbox_sinusoid_emb_2d": 48,
        "dim_bbox_sinusoid_emb_1d": 6,
        "dim_bbox_projection": 16,
    },
    "depth_pro": {
        "patch_size": 64,
        "intermediate_hook_ids": [1, 0],
        "image_model_config.image_size": 64,
        "patch_model_config.image_size": 64,
        "fov_model_config.image_size": 64,
    },
    "pp_ocrv6_small_det": {**_LCNET_STAGES, "layer_list_out_channels": [32, 48, 64, 96]},
    "pp_ocrv6_small_rec": _LCNET,
    "pp_ocrv6_tiny_rec": _LCNET,
    "pp_ocrv6_medium_det": {
        **_LCNET_STAGES,
        "intraclass_block_config": _INTRACLASS,
        "scale_factor_list": [1, 2, 4, 8],
        "kernel_list": [3, 2, 2],
    },
    "qwen2_5_omni_thinker": {
        **_OMNI,
        "text_config.hidden_size": 128,
        "text_config.num_attention_heads": 4,
        "text_config.num_key_value_heads": 2,
        "text_config.rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
    },
    "qwen3_omni_moe_thinker": _OMNI,
    "sam2_hiera_det_model": {**_HIERA, "image_size": [128, 128]},
    "sam2_vision_model": _SAM2_VISION,
    "sam2": _SAM2,
    "sam2_video": {**_SAM2, "image_size": 256},
    "sam3_tracker_video": {
        "image_size": 56,
        "vision_config.backbone_config.image_size": 56,
        "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "prompt_encoder_config.image_size": 56,
    },
    "sam3_tracker": {"vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "step3p7": {
        "vision_config.hidden_size": 64,
        "vision_config.num_attention_heads": 4,
        "text_config.sliding_window": 16,
    },
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "timesfm2_5": {"context_length": 256},
    "tvp": {"num_frames": 2, "max_img_size": 64, "visual_prompt_size": 8},
    "uvdoc": {
        "backbone_config.depths": [1, 1, 1, 3, 3, 3],
        "backbone_config.out_features": [f"stage{n}" for n in range(1, 7)],
        "backbone_config.out_indices": [*range(1, 7)],
    },
    "vibevoice_acoustic_tokenizer": {"vae_std": 0.0},
    "vjepa2": {"crop_size": 64, "frames_per_clip": 4},
    "vits": {
        "noise_scale": 0.0,
        "noise_scale_duration": 0.0,
        "upsample_initial_channel": 32,
        "upsample_rates": [4, 2],
        "upsample_kernel_sizes": [8, 4],
    },
    "voxtral": {"audio_token_id": 120},
    "minicpm_ocr": {"image_token_id": 120},
    "minicpmv4_6": {"image_token_id": 120},
    "minicpmv4_7": {"image_token_id": 120},
    "seggpt": {"image_size": [64, 32]},
    "zamba2": {
        "mamba_headdim": 40,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [2],
    },
}
