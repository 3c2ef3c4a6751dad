"""Tokenizers of language models in small: bytes, tokens of chats, and templates that use them."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from cache_fixtures import captions
from models import save
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
"""Of Qwen2.5 and Qwen3, without what is for tools."""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content[0].text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{% for block in message.content %}{{ block.text }}{% endfor %}[/INST]"
    "{% endif %}{% endfor %}"
)
"""Of Mistral Small 3.1, without what is for tools."""
PROMPTS = [
    'A red fox reads a sign: "Open at 9", cinematic',
    "Ein Fuchs über dem Fluß, „Öl auf Leinwand“",
    "一只狐狸在雪地里 水墨画",
    "Лиса под дождём, ночь",
    "",
]
"""In four languages, and the empty one."""
SIZE = 420
LONGEST = 1200
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<s>", "</s>"),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
)


@functools.cache
def _tokenizer(begin: str) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=SIZE - 20,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["assistant user system"] * 99 + captions(50, seed=1), trainer)
    if begin:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return tokenizer


class ChatTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers is untyped
    """Takes what processors take, too."""

    def __call__(self, *texts: Any, images: None = None, videos: None = None, **given: Any) -> Any:
        return super().__call__(*texts, **given)


def chat_tokenizer(folder: Path, template: str = CHATML, side: str = "right") -> Path:
    """Put `tokenizer.json` and its config into a folder; that of Mistral begins a text with <s>."""
    begin = "<s>" if template == MISTRAL else ""
    _tokenizer(begin).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": LONGEST,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": side,
        "pad_token": "<|endoftext|>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


_TEXT = {
    "vocab_size": SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 5,
    "eos_token_id": 6,
    "pad_token_id": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_EYE = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1}
_SIGLIP = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
_PIXTRAL = {**_SIGLIP, "model_type": "pixtral", "head_dim": 8}
_QWEN25 = {**_TEXT, "rope_parameters": _ROPE}
CONFIGS: Mapping[str, Callable[[int], Any]] = {
    "qwen3": lambda layers: transformers.Qwen3Config(**_TEXT, num_hidden_layers=layers),
    "qwen25-vl": lambda layers: transformers.Qwen2_5_VLConfig(
        text_config={**_QWEN25, "num_hidden_layers": layers},
        vision_config={**_EYE, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    ),
    "qwen25-vl-text": lambda layers: transformers.Qwen2_5_VLTextConfig(
        **_QWEN25, num_hidden_layers=layers
    ),
    "qwen3-vl": lambda layers: transformers.Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": _ROPE, "num_hidden_layers": layers},
        vision_config={**_EYE, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    ),
    "mistral3": lambda layers: transformers.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral", "num_hidden_layers": layers},
        vision_config=_PIXTRAL,
    ),
    "gemma3": lambda layers: transformers.Gemma3Config(
        text_config={**_TEXT, "num_hidden_layers": layers, "sliding_window": 16},
        vision_config=_SIGLIP,
        mm_tokens_per_image=4,
    ),
    "llama": lambda layers: transformers.LlamaConfig(**_TEXT, num_hidden_layers=layers),
    "gemma2": lambda layers: transformers.Gemma2Config(**_TEXT, num_hidden_layers=layers),
}


def language_model(
    folder: Path, kind: str, name: str, layers: int, template: str = CHATML, side: str = "right"
) -> Path:
    """Write a folder of a language model with seeded weights, and its tokenizer.

    Args:
        kind: a key of `CONFIGS`.
        name: the class.
    """
    config = CONFIGS[kind](layers)
    config.architectures = [name]
    save(getattr(transformers, name), config, folder, torch.float32, 11)
    return chat_tokenizer(folder, template, side)
