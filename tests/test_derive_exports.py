"""What is derived for each modality is what models take: tiny ones become verified engines."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exports import make
from models import VOCABULARY, save
from transformers import PreTrainedModel

LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
WAVES = {
    "conv_kernel": [10, 3, 2],
    "conv_stride": [5, 2, 2],
    "conv_dim": [16, 16, 16],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
}
LISTENS = {
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}
CONVOLVES = {"embedding_size": 16, "hidden_sizes": [16, 24, 32], "depths": [1, 1, 1]}
FRAMES = {"image_size": 32, "num_frames": 4, "patch_size": 16}


@pytest.mark.parametrize(
    ("model_class", "fields", "symbols"),
    [
        pytest.param(
            transformers.Wav2Vec2Model,
            {"vocab_size": VOCABULARY, **LAYERS, **WAVES},
            {"samples": (170, 10250)},
            id="waveform",
        ),
        pytest.param(
            transformers.ResNetModel,
            CONVOLVES,
            {"height": (64, 2048), "width": (64, 2048)},
            id="image without a size",
        ),
        pytest.param(
            transformers.BartModel,
            {**PAIR, "max_position_embeddings": 40},
            {"sequence": (1, 40), "target_sequence": (1, 40)},
            id="encoder and decoder",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            transformers.WhisperModel,
            {**PAIR, **LISTENS},
            {"target_sequence": (1, 448)},
            id="spectrogram and text",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            transformers.LayoutLMModel,
            {"vocab_size": VOCABULARY, **LAYERS},
            {"sequence": (1, 512)},
            id="boxes",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            transformers.VideoMAEModel,
            {**LAYERS, **FRAMES},
            {},
            id="video",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            transformers.ASTModel,
            {**LAYERS, "max_length": 64, "num_mel_bins": 32},
            {},
            id="spectrogram",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_is_verified(
    tmp_path: Path,
    model_class: type[PreTrainedModel],
    fields: dict[str, Any],
    symbols: dict[str, tuple[int, int]],
) -> None:
    config_class: Any = model_class.config_class
    folder = save(model_class, config_class(**fields), tmp_path / "model", torch.float32, 0)
    done = make(str(folder), tmp_path / "bundle", "fp32")
    assert done.report.verdict.outcome == "verified"
    assert done.bundle is not None
    assert done.bundle.manifest.symbols == {"batch": (1, 64), **symbols}
