"""What is derived for each modality is what models take: tiny ones become verified engines."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exports import make
from models import VOCABULARY, save, tiny_bert
from transformers import PreTrainedModel

import enginecast
from enginecast.capture.sources.open_source import open_source

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


@pytest.mark.slow
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


def test_an_engine_takes_what_the_tokenizer_gives(tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "bert", layers=1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = transformers.BertTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    done = make(str(folder), tmp_path / "bundle", "fp32")
    assert done.bundle is not None
    feeds = tokenizer(["a b", "c"], ["d", "e f g"], padding=True, return_tensors="pt")
    assert feeds["token_type_ids"].any()
    result = enginecast.load(done.bundle.root).run(feeds)["last_hidden_state"]
    eager = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = eager(**feeds).last_hidden_state
    torch.testing.assert_close(torch.from_numpy(result), expected)

    config = folder / "tokenizer_config.json"
    kept = json.loads(config.read_text()) | {"model_input_names": ["input_ids", "attention_mask"]}
    config.write_text(json.dumps(kept), encoding="utf-8")
    assert open_source(str(folder)).tokenized == ("input_ids", "attention_mask")
