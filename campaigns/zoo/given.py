"""Inputs as the processor of a model type makes them, where its config does not say it all.

What is here goes through `--inputs FILE.safetensors`, as a user gives it.  This is data of the
test; the product has no such table.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

Inputs = dict[str, Tensor]
Config = Any
"""A config, whose fields depend on the model type."""


def _floats(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1))


def _ids(high: int, *sizes: int) -> Tensor:
    return torch.randint(3, high, sizes, generator=torch.Generator().manual_seed(2))


def _text(high: int, *sizes: int) -> Inputs:
    return {"input_ids": _ids(high, *sizes), "attention_mask": torch.ones(sizes, dtype=torch.int64)}


def _holding(placeholder: int, count: int, batch: int = 2, after: int = 4) -> Inputs:
    """Text in which every row has `count` placeholders, behind one token."""
    found = _text(100, batch, 1 + count + after)
    found["input_ids"][:, 1 : 1 + count] = placeholder
    return found


def _image(config: Config, batch: int = 2) -> Tensor:
    side = config.image_size
    return _floats(batch, 3, side, side)


def _blip(config: Config) -> Inputs:
    found = _holding(config.image_token_index, config.num_query_tokens)
    return {**found, "pixel_values": _image(config.vision_config)}


def _instructed(config: Config) -> Inputs:
    asked = _text(100, 2, 6)
    asked = {f"qformer_{name}": tensor for name, tensor in asked.items()}
    if getattr(config, "video_token_index", None) is None:
        return {**_blip(config), **asked}
    frames, side = 4, config.vision_config.image_size
    found = _holding(config.video_token_index, config.num_query_tokens * frames)
    return {**found, **asked, "pixel_values": _floats(2, frames, 3, side, side)}


def _voxtral(config: Config) -> Inputs:
    audio = config.audio_config
    positions = audio.max_source_positions
    count = positions * audio.hidden_size // audio.intermediate_size
    return {
        **_holding(config.audio_token_id, count),
        "input_features": _floats(2, audio.num_mel_bins, 2 * positions),
    }


def _kosmos(config: Config) -> Inputs:
    count = config.latent_query_num
    found = _text(100, 2, count + 6)
    mask = torch.zeros_like(found["input_ids"])
    mask[:, 2 : 2 + count] = 1
    pixels = _image(config.vision_config)
    return {**found, "pixel_values": pixels, "image_embeds_position_mask": mask}


def _idefics(config: Config) -> Inputs:
    side = config.vision_config.image_size
    seen = torch.ones(2, 7, 2, dtype=torch.int64)
    pixels = _floats(2, 2, 3, side, side)
    return {**_text(100, 2, 7), "pixel_values": pixels, "image_attention_mask": seen}


def _boxed(config: Config) -> Inputs:
    corners = _floats(2, 7, 4).abs().clamp(max=1).sort(-1).values
    return {**_text(100, 2, 7), "bbox": corners}


def _regions(config: Config) -> Inputs:
    boxes = _floats(2, 5, 4).abs().clamp(max=1).sort(-1).values
    feats = _floats(2, 5, config.visual_feat_dim)
    return {**_text(100, 2, 7), "visual_feats": feats, "visual_pos": boxes}


def _mel_first(frames: int) -> Callable[[Config], Inputs]:
    return lambda config: {"input_features": _floats(2, config.num_mel_bins, frames)}


def _stacked(config: Config) -> Inputs:
    """Pairs of frames of mel bins and of how these change."""
    return {"input_features": _floats(2, 64, 4 * config.num_mel_bins)}


def _masked_audio(config: Config) -> Inputs:
    frames = 4 * config.n_window
    return {**_mel_first(frames)(config), "input_features_mask": torch.ones(2, frames).long()}


def _gemma_audio(config: Config) -> Inputs:
    mel = _floats(2, 64, config.input_feat_size)
    return {"audio_mel": mel, "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool)}


def _game(config: Config) -> Inputs:
    return {
        "states": _floats(2, 5, config.state_dim),
        "actions": _floats(2, 5, config.act_dim),
        "rewards": _floats(2, 5, 1),
        "returns_to_go": _floats(2, 5, 1),
        "timesteps": torch.arange(5).repeat(2, 1),
        "attention_mask": torch.ones(2, 5, dtype=torch.int64),
    }


def _naflex(config: Config) -> Inputs:
    """Patches of images of 4 x 3 and padding, as Siglip2's processor gives them."""
    vision: Config = getattr(config, "vision_config", config)
    patches = _floats(2, 16, 3 * vision.patch_size**2)
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[:, 12:] = 0
    found = {
        "pixel_values": patches,
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 3], [3, 4]]),
    }
    return {**_text(100, 2, 7), **found} if vision is not config else found


def _packed(width: Callable[[Config], int]) -> Callable[[Config], Inputs]:
    """Patches of one image of 4 x 6, in one row."""

    def make(config: Config) -> Inputs:
        grid = torch.tensor([[1, 4, 6]])
        return {"pixel_values": _floats(24, width(config)), "grid_thw": grid}

    return make


def _of_two_frames(config: Config) -> int:
    return int(3 * config.patch_temporal * config.patch_size**2)


def _square_patches(config: Config) -> Inputs:
    side = config.patch_size
    return {"pixel_values": _floats(24, 3, side, side), "grid_thw": torch.tensor([[1, 4, 6]])}


def _merged_patches(config: Config) -> Inputs:
    side = config.patch_size * config.spatial_merge_size
    pixels = _floats(6, side, side, 3)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 3]])}


def _sliced(config: Config) -> Inputs:
    """Patches of one image of 4 x 4 in a row of pixels, as MiniCPM-V takes them."""
    side = config.patch_size
    return {
        "pixel_values": _floats(1, 3, side, side * 16),
        "target_sizes": torch.tensor([[4, 4]], dtype=torch.int32),
    }


def _with_sliced(config: Config) -> Inputs:
    """An image of 8 x 8 patches, of which 4 x 4 become one token, or 2 x 2 for fine print."""
    side = config.vision_config.patch_size
    count = 16 if config.downsample_mode == "4x" else 4
    return {
        **_holding(config.image_token_id, count, batch=1),
        "pixel_values": _floats(1, 3, side, side * 64),
        "target_sizes": torch.tensor([[8, 8]], dtype=torch.int32),
    }


def _typed(config: Config) -> Inputs:
    """As before, with the kind of each token, 0 for text and 1 for images; and with the places
    that `get_rope_index` gives for it: the turn, the row and the column.

    The model works places out in Python, by the values of ids, where none are given.
    """
    found = _with_sliced(config)
    kinds = (found["input_ids"] == config.image_token_id).int()
    count = int(kinds.sum())
    side = math.isqrt(count)
    turn = torch.tensor([0] * (1 + count) + [1 + side + n for n in range(4)])
    row, column = turn.clone(), turn.clone()
    row[1 : 1 + count] += torch.arange(count) // side
    column[1 : 1 + count] += torch.arange(count) % side
    places = torch.stack([turn, row, column]).unsqueeze(1)
    return {**found, "mm_token_type_ids": kinds, "position_ids": places}


def _seen(count: int, *shape: int) -> Callable[[Config], Inputs]:
    """Images that become `count` tokens each, in a text that holds these."""
    return lambda config: {
        **_holding(config.image_token_id, count),
        "pixel_values": _floats(2, *shape),
    }


def _heard_and_seen(config: Config) -> Inputs:
    """An image and a sound, each with the tokens that stand for it."""
    found = _text(100, 2, 40)
    images, sounds = config.vision_soft_tokens_per_image, config.audio_soft_tokens_per_image
    found["input_ids"][:, 2 : 2 + images] = config.image_token_id
    found["input_ids"][:, 20 : 20 + sounds] = config.audio_token_id
    return {
        **found,
        "pixel_values": _floats(2, 3, 64, 64),
        "input_features": _floats(2, 64, config.audio_config.input_feat_size),
        "input_features_mask": torch.ones(2, 64, dtype=torch.bool),
    }


def _film(*others: str) -> Callable[[Config], Inputs]:
    """Four frames; and, of `others`, a text and a sound of as many frames of the codec.

    With as many, no frame is repeated or left out: the model asks for that by values.
    """

    def make(config: Config) -> Inputs:
        found = {"pixel_values_videos": _floats(2, 4, 3, 56, 56)}
        if "text" in others:
            found |= _text(100, 2, 7)
        if "sound" in others:
            found["input_values"] = _floats(2, 1, 4 * 1920)
        return found

    return make


def _patched(config: Config) -> Inputs:
    """Bytes, and how many of them are in each patch, which a patcher has measured."""
    return {
        "input_ids": _ids(100, 2, 9),
        "patch_lengths": torch.tensor([[1, 3, 4, 2], [1, 2, 2, 5]]),
    }


def _streamed(config: Config) -> Inputs:
    """Sound that is added to the tokens so far: eight frames to each of them."""
    bins = config.audio_config.num_mel_bins
    frames = 2 * config.downsample_factor * 7
    return {**_text(100, 2, 7), "input_features": _floats(2, bins, frames)}


def _named_classes(config: Config) -> Inputs:
    """An image, the names of three classes to look for in it, and the task in words."""
    side = config.image_size
    classes, task = _text(100, 3, 6), _text(100, 1, 9)
    return {
        "pixel_values": _floats(1, 3, side, side),
        **{f"classes_{name}": tensor for name, tensor in classes.items()},
        **{f"tasks_{name}": tensor for name, tensor in task.items()},
        "classes_structure": torch.tensor([3]),
    }


def _robot(config: Config) -> Inputs:
    """Images of two cameras, a text, and what the robot does."""
    vision = config.vlm_config.vision_config
    count = (vision.image_size // vision.patch_size) ** 2
    return {
        **_holding(config.vlm_config.image_token_id, 2 * count),
        "action_embeds": _floats(2, 6, config.dit_config.hidden_size),
        "pixel_values": _floats(2, 2, 3, vision.image_size, vision.image_size),
        "pixel_attention_mask": torch.ones(2, 2, dtype=torch.bool),
    }


def _positioned(config: Config) -> Inputs:
    """Patches of an image of 6 x 6, with the place of each."""
    rows, columns = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    places = torch.stack([columns, rows], -1).reshape(1, 36, 2)
    return {
        "pixel_values": _floats(1, 36, 3 * config.patch_size**2),
        "pixel_position_ids": places,
    }


def _page(config: Config) -> Inputs:
    """Pages whose sides are multiples of 32, as the processor resizes them."""
    return {"pixel_values": _floats(2, 3, 64, 96)}


def _frame(config: Config) -> Inputs:
    """A frame of a video, or two: at the size that positions in the image are numbered for."""
    side = config.prompt_encoder_config.image_size
    return {"pixel_values": _floats(2, 3, side, side)}


GIVEN: dict[str, Callable[[Config], Inputs]] = {
    "higgs_audio_v2_tokenizer": lambda c: {"input_values": _floats(2, 1, 12 * c.hop_length)},
    "bark": lambda c: _text(100, 2, 7),
    "edgetam_video": _frame,
    "edgetam_vision_model": lambda c: {"pixel_values": _floats(2, 3, 128, 128)},
    "pp_ocrv6_medium_det": _page,
    "pp_ocrv6_small_det": _page,
    "sam2_video": _frame,
    "sam3_tracker_video": _frame,
    "glm_image_vqmodel": lambda c: {"hidden_states": _floats(2, c.latent_channels, 6, 8)},
    "timm_backbone": lambda c: {"pixel_values": _floats(2, c.num_channels, 96, 64)},
    "voxtral_realtime_text": lambda c: {
        **_text(100, 2, 7),
        "t_cond": _floats(1, 1, c.hidden_size),
    },
    "fast_vlm": _seen(4, 3, 128, 128),
    "gemma3n": _heard_and_seen,
    "gemma3n_vision": lambda c: {"pixel_values": _floats(2, 3, 64, 64)},
    "omdet-turbo": _named_classes,
    "pe_audio_video": _film("text", "sound"),
    "pe_audio_video_encoder": _film("sound"),
    "pe_video": _film("text"),
    "pe_video_encoder": _film(),
    "perception_lm": _seen(16, 1, 3, 56, 56),
    "voxtral_realtime": _streamed,
    "blip-2": _blip,
    "blip_2_qformer": lambda c: {
        "query_embeds": _floats(2, 6, c.hidden_size),
        "encoder_hidden_states": _floats(2, 5, c.encoder_hidden_size),
    },
    "blt": _patched,
    "bros": _boxed,
    "clvp": lambda c: {
        **_text(100, 2, 7),
        "input_features": _floats(2, c.decoder_config.feature_size, 32),
    },
    "decision_transformer": _game,
    "dia": lambda c: {
        **_text(100, 2, 7),
        "decoder_input_ids": _ids(100, 2, 5, c.decoder_config.num_channels),
    },
    "diffusion_gemma": lambda c: {
        **_text(100, 2, 7),
        "decoder_input_ids": _ids(100, 2, c.canvas_length),
    },
    "efficientloftr": lambda c: {"pixel_values": _floats(1, 2, 3, 64, 64)},
    "emu3": lambda c: _text(100, 2, 7),
    "fastspeech2_conformer_with_hifigan": lambda c: _text(60, 1, 7),
    "fun_asr_nano_encoder": lambda c: {
        "input_features": _floats(2, 32, 560),
        "input_features_mask": torch.ones(2, 32, dtype=torch.int64),
    },
    "gemma3n_audio": _gemma_audio,
    "gemma4_audio": lambda c: {
        "input_features": _floats(2, 64, c.subsampling_conv_channels[0]),
        "attention_mask": torch.ones(2, 64, dtype=torch.bool),
    },
    "gemma4_vision": _positioned,
    "glmasr_encoder": _mel_first(64),
    "granite_speech5_ctc": lambda c: _stacked(c.encoder_config),
    "granite_speech5_encoder": _stacked,
    "idefics": _idefics,
    "inkling2_vision": _merged_patches,
    "instructblip": _instructed,
    "instructblipvideo": _instructed,
    "kimi_k25_vision": _square_patches,
    "kosmos-2": _kosmos,
    "kyutai_speech_to_text": lambda c: {"input_ids": _ids(100, 2, 7, c.num_codebooks + 1)},
    "lightglue": lambda c: {"pixel_values": _floats(1, 2, 3, 64, 64)},
    "lxmert": _regions,
    "minicpm_ocr": _with_sliced,
    "minicpmv4_6": _with_sliced,
    "minicpmv4_7": _typed,
    "muse_spark_audio": lambda c: {"input_values": _floats(2, 3840)},
    "pi0": _robot,
    "chameleon": lambda c: _text(100, 2, 7),
    "depth_pro": lambda c: {"pixel_values": _floats(1, 3, 256, 256)},
    "minicpm_ocr_vision": _sliced,
    "minicpmv4_7_vision": _sliced,
    "muse_glimmer_assistant": lambda c: {
        "noise_embeds": _floats(2, c.block_size, c.hidden_size),
        "context_hidden_states": _floats(2, 7, c.hidden_size * len(c.target_layer_ids)),
        "attention_mask": torch.ones(2, 7 + c.block_size, dtype=torch.int64),
    },
    "muse_glimmer_vision": _packed(_of_two_frames),
    "muse_spark_vision": _packed(_of_two_frames),
    "oneformer": lambda c: {
        "pixel_values": _floats(1, 3, 64, 64),
        "task_inputs": _ids(100, 1, c.task_seq_len),
    },
    "qwen3_asr_encoder": _masked_audio,
    "seggpt": lambda c: {
        name: _floats(2, 3, c.image_size[1], c.image_size[1])
        for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    },
    "siglip2": _naflex,
    "siglip2_vision_model": _naflex,
    "speecht5": lambda c: {
        "input_values": _floats(2, 9, c.hidden_size),
        "decoder_input_values": _floats(2, 5, c.hidden_size),
    },
    "tvp": lambda c: {**_text(100, 1, 7), "pixel_values": _floats(1, 2, 3, 64, 64)},
    "univnet": lambda c: {
        "input_features": _floats(2, 8, c.num_mel_bins),
        "noise_sequence": _floats(2, 8, c.model_in_channels),
    },
    "vibevoice_acoustic_tokenizer_decoder": lambda c: {
        "hidden_states": _floats(2, c.hidden_size, 8),
    },
    "vibevoice_acoustic_tokenizer_encoder": lambda c: {
        "hidden_states": _floats(2, c.channels, 6400),
    },
    "video_llama_3_vision": lambda c: {
        **_packed(lambda c: 3 * c.patch_size**2)(c),
        "merge_sizes": torch.tensor([2]),
    },
    "vit_mae": lambda c: {
        "pixel_values": _image(c),
        "noise": _floats(2, (c.image_size // c.patch_size) ** 2),
    },
    "voxtral": _voxtral,
    "voxtral_realtime_encoder": _mel_first(64),
    "xcodec2": lambda c: {
        "input_values": _floats(2, 1, 10240),
        "input_features": _floats(2, 32, 20),
        "input_features_mask": torch.ones(2, 32, dtype=torch.int64),
    },
}


def given_inputs(model_type: str, config: PreTrainedConfig) -> Inputs:
    """The inputs of a type, for a tiny config of it."""
    return GIVEN[model_type](config)
