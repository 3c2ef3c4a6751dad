"""Text encoders in small with a tokenizer trained on the spot, and captions for them."""

import functools
import json
from pathlib import Path

import numpy as np
import torch
from models import save, t5_config
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5EncoderModel,
)

VOCABULARY = 320
T5_LENGTH = 64
CLIP_LENGTH = 77
START, END = "<|startoftext|>", "<|endoftext|>"

_TEXT = """a the of in on with and at by over under near photo painting drawing portrait
close-up wide shot red green blue yellow black white golden silver old young tall small huge tiny
wooden glass stone fox dog cat bird horse child woman man robot city street forest river mountain
sea beach house tower bridge train car bicycle lamp table chair book flower tree cloud moon sun
star rain snow fog morning evening night light shadow running sitting standing flying sleeping
looking wearing holding hat coat scarf boots highly detailed soft dramatic lighting film grain 35mm
cinematic oil watercolour ink style by an unknown artist"""
_WORDS = _TEXT.split()


def captions(count: int, seed: int = 0) -> list[str]:
    """Texts as people write them: mostly 5 to 30 words, some much longer, some with commas."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(2.5, 0.6, count), 1, 90).astype(int)
    made = []
    for length in lengths:
        words = [_WORDS[index] for index in random.integers(0, len(_WORDS), length)]
        commas = random.random(length) < 0.15
        made.append(" ".join(w + "," * bool(c) for w, c in zip(words, commas, strict=True)))
    return made


def short_captions(count: int, seed: int = 0) -> list[str]:
    """Captions that fit into `T5_LENGTH` and `CLIP_LENGTH` tokens."""
    return [" ".join(text.split()[:12]) for text in captions(count, seed)]


def words_t5(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A T5 encoder of hidden 32 with a Unigram tokenizer, at most 64 tokens."""
    config = t5_config()
    config.vocab_size = VOCABULARY
    save(T5EncoderModel, config, folder, dtype, seed)
    return add_t5_tokenizer(folder)


def words_clip(folder: Path, *, projection: bool = False, seed: int = 0) -> Path:
    """CLIP's text model of hidden 32, with a projection to 24; its tokenizer pads with the end."""
    tokenizer = _clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        projection_dim=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.token_to_id(START),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=1,  # as in the configs that people have; the tokenizer pads with its end
        architectures=["CLIPTextModelWithProjection" if projection else "CLIPTextModel"],
    )
    kind = CLIPTextModelWithProjection if projection else CLIPTextModel
    save(kind, config, folder, torch.float32, seed)
    return add_clip_tokenizer(folder)


def add_t5_tokenizer(folder: Path) -> Path:
    """`tokenizer.json` and its config: "</s>" ends a text, "<pad>" fills up."""
    _t5_tokenizer().save(str(folder / "tokenizer.json"))
    return _configure(folder, T5_LENGTH, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def add_clip_tokenizer(folder: Path) -> Path:
    """`tokenizer.json` and its config: start and end around a text, the end fills up."""
    _clip_tokenizer().save(str(folder / "tokenizer.json"))
    return _configure(
        folder, CLIP_LENGTH, bos_token=START, eos_token=END, unk_token=END, pad_token=END
    )


def _configure(folder: Path, longest: int, **tokens: str) -> Path:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "model_input_names": ["input_ids", "attention_mask"],
        **tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


RAREST = -10.36
"""The score of the letters that no longer piece needs, which training numbers as they come."""


def _in_order(tokenizer: Tokenizer, specials: int) -> Tokenizer:
    """The tokenizer with its pieces in one order: training gives equal ones in another order from
    process to process, and processes share what tests make.
    """
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    if model["type"] == "Unigram":
        kept, rest = model["vocab"][:specials], model["vocab"][specials:]
        scored = [[piece, max(round(score, 9), RAREST)] for piece, score in rest]
        model["vocab"] = [*kept, *sorted(scored, key=lambda each: (-each[1], each[0]))]
    else:
        pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
        merged = dict.fromkeys("".join(pair) for pair in model["merges"])
        letters = sorted(piece for piece in pieces[specials:] if piece not in merged)
        ordered = [*pieces[:specials], *letters, *merged]
        model["vocab"] = {piece: number for number, piece in enumerate(ordered)}
    return Tokenizer.from_str(json.dumps(state))


@functools.cache
def _t5_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = UnigramTrainer(
        vocab_size=VOCABULARY - 20,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions(300, seed=1), trainer)
    tokenizer = _in_order(tokenizer, specials=3)
    tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return tokenizer


@functools.cache
def _clip_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE(unk_token=END, end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - 20,
        special_tokens=["!", START, END],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions(300, seed=1), trainer)
    tokenizer = _in_order(tokenizer, specials=3)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A {END}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (START, END)],
    )
    return tokenizer
