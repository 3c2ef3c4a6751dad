"""Which attention a model is loaded with: sdpa where it has it; parts without take their own."""

from pathlib import Path

import torch
from models import save
from transformers import DetrConfig, DetrModel

from enginecast.capture.sources.source import open_source

BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "out_features": ["stage2"],
}


def test_a_backbone_without_sdpa_does_not_keep_the_model_from_loading(tmp_path: Path) -> None:
    config = DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=BACKBONE,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=5,
        architectures=["DetrModel"],
    )
    source = open_source(str(save(DetrModel, config, tmp_path, torch.float32, 0)))
    for module in (source.eager(), source.empty()):
        assert isinstance(module, DetrModel)
        assert module.config._attn_implementation == "sdpa"
        assert module.config.backbone_config._attn_implementation == "eager"
