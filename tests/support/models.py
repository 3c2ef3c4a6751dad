"""Tiny real models with seeded weights, saved the way users have them on disk.

Random initialization hides bugs: norm weights of one do not show a dropped scale, and activations
of one size do not show a range problem.  So norm weights and biases are perturbed and a few
channels are made outliers.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

VOCABULARY = 96
"""Size of every text model's vocabulary; no width or example size (3, 7) equals it."""

OUTLIER_CHANNELS = (5, 11)
OUTLIER_SCALE = 12.0


def t5_config(*, gated: bool = True, layers: int = 2) -> T5Config:
    """T5 v1.1 (gated) or v1.0 (relu) in small: hidden 32, 4 heads of 8, feed-forward 64."""
    return T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=layers,
        num_heads=4,
        feed_forward_proj="gated-gelu" if gated else "relu",
        use_cache=False,
        architectures=["T5EncoderModel"],
    )


def bert_config(*, layers: int = 2) -> BertConfig:
    """BERT in small: hidden 32, 4 heads, at most 64 tokens."""
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        architectures=["BertModel"],
    )


def llama_config(*, layers: int = 2) -> LlamaConfig:
    """Llama in small: hidden 32, 4 heads with 2 key-value heads, at most 64 tokens."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        architectures=["LlamaModel"],
    )


def vit_config(*, layers: int = 2) -> ViTConfig:
    """ViT in small: 16 x 16 images in patches of 4, hidden 32, 4 heads."""
    return ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=3,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=48,
        architectures=["ViTModel"],
    )


def tiny_t5(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    gated: bool = True,
    layers: int = 2,
    seed: int = 0,
) -> Path:
    """Save a T5 encoder in `folder`.

    float16 goes through `from_pretrained`, so `wo` stays in float32, as in files that users have.
    """
    return save(T5EncoderModel, t5_config(gated=gated, layers=layers), folder, dtype, seed)


def tiny_bert(
    folder: Path, *, dtype: torch.dtype = torch.float32, layers: int = 2, seed: int = 0
) -> Path:
    """Save a BERT model in `folder`."""
    return save(BertModel, bert_config(layers=layers), folder, dtype, seed)


def tiny_llama(
    folder: Path, *, dtype: torch.dtype = torch.float32, layers: int = 2, seed: int = 0
) -> Path:
    """Save a Llama model without head in `folder`."""
    return save(LlamaModel, llama_config(layers=layers), folder, dtype, seed)


def tiny_vit(
    folder: Path, *, dtype: torch.dtype = torch.float32, layers: int = 2, seed: int = 0
) -> Path:
    """Save a ViT model in `folder`."""
    return save(ViTModel, vit_config(layers=layers), folder, dtype, seed)


def save(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    folder: Path,
    dtype: torch.dtype,
    seed: int,
) -> Path:
    """Save a seeded, perturbed `model_class`; another `dtype` goes through `from_pretrained`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        perturb(model)
    model.save_pretrained(folder)
    if dtype != torch.float32:
        model_class.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return folder


def perturb(model: nn.Module) -> None:
    """Give norm weights and biases distinct values, and a few norm channels a large scale."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim != 1:
                continue
            parameter.add_(torch.randn_like(parameter) * 0.1)
            is_wide = parameter.numel() > max(OUTLIER_CHANNELS)
            if is_wide and "norm" in name.lower() and name.endswith("weight"):
                parameter[list(OUTLIER_CHANNELS)] *= OUTLIER_SCALE


def add_tokenizer(folder: Path) -> Path:
    """Put a word-level tokenizer.json beside a text model: "a b" is [2, 3, 1], padding is 0."""
    letters = [chr(ord("a") + index) for index in range(26)]
    words = ["<pad>", "</s>", *letters]
    vocabulary = {word: index for index, word in enumerate([*words, "<unk>"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
