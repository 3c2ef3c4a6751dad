"""Small models of real families, each made and captured once in a process, whatever files ask.

Nobody changes them: a pass runs on a copy.
"""

import functools
from collections.abc import Callable

import models
import torch
from programs import TOKENS, Image, Text, captured, prompts, rewritten, seeded
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import BertModel, GemmaConfig, GemmaModel, LlamaModel, T5EncoderModel, ViTModel

GEMMA = GemmaConfig(
    vocab_size=models.VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
    head_dim=8,
)
MAKE: dict[str, Callable[[], nn.Module]] = {
    "t5": lambda: Text(seeded(T5EncoderModel, models.t5_config())),
    "t5 relu": lambda: Text(seeded(T5EncoderModel, models.t5_config(gated=False))),
    "bert": lambda: Text(seeded(BertModel, models.bert_config())),
    "llama": lambda: Text(seeded(LlamaModel, models.llama_config())),
    "gemma": lambda: Text(seeded(GemmaModel, GEMMA)),
    "vit": lambda: Image(seeded(ViTModel, models.vit_config())),
}


def inputs_of(name: str, batch: int, tokens: int) -> tuple[Tensor, ...]:
    """Inputs for a model of this name."""
    return (torch.randn(batch, 3, 16, 16),) if name == "vit" else prompts(batch, tokens)


def capture_model(name: str, module: nn.Module) -> ExportedProgram:
    """The program of a module that takes what the model of this name takes."""
    dynamic = {0: TOKENS[0]} if name == "vit" else TOKENS
    return captured(module, *inputs_of(name, 3, 7), dynamic=dynamic)


@functools.cache
def tiny_module(name: str) -> nn.Module:
    """The model of this name."""
    return MAKE[name]()


@functools.cache
def tiny_program(name: str) -> ExportedProgram:
    """Its program, in fp32."""
    with torch.random.fork_rng(devices=[]):  # a test draws the same whoever captured first
        torch.manual_seed(0)
        return capture_model(name, tiny_module(name))


@functools.cache
def exact_program(name: str) -> ExportedProgram:
    """Its program in fp64, for reference."""
    return rewritten(tiny_program(name), "unify-dtype{to=fp64}")[0]
