"""What tests of engines that generate text share."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import enginecast
from enginecast.compiler.request import ModelOptions
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.engine import Engine

Feeds = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Feeds], Mapping[str, np.ndarray[Any, Any]]]
"""Makes other inputs of some of an engine's."""
TEXTS = (
    "a red fox jumps over the lazy dog while two cats sleep on a sofa",
    "sphinx of black quartz, judge my vow; pack my box with five dozen liquor jugs",
)
CHAT = "{% for each in messages %}{{ bos_token }}{{ each.content }} two{% endfor %}"
TASK = ModelOptions(kv_cache=True)


def save_with_tokenizer(model: PreTrainedModel, folder: Path) -> PreTrainedTokenizerFast:
    """Write a model with a vocabulary of 99 and a tokenizer as SentencePiece has it."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=99, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)
    found.chat_template = CHAT
    found.save_pretrained(folder)
    return found


def export(model: PreTrainedModel | str, folder: Path, **options: Any) -> Bundle:
    return enginecast.compile(model, folder, options=TASK, **options)


def feed_otherwise(monkeypatch: pytest.MonkeyPatch, engine: Engine, change: Change) -> None:
    """Let an engine be fed what `change` makes of its inputs."""
    run = engine.run
    monkeypatch.setattr(
        engine, "run", lambda feeds, **more: run({**feeds, **change(feeds)}, **more)
    )
