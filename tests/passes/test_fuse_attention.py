"""fuse-attention: called and spelled out, grouped queries, masks; left alone with the reason."""

import functools
import math
from collections.abc import Callable
from typing import Any

import golden
import models
import pytest
import torch
from programs import (
    TOKENS,
    Function,
    Text,
    captured,
    count,
    ir_diff,
    notes,
    outputs,
    prompts,
    reasons,
    relative_error,
    reloaded,
    rewritten,
    same_bits,
    seeded,
    values,
)
from tiny_programs import capture_model, inputs_of, tiny_program
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import BertModel, GemmaConfig, GemmaModel, T5EncoderModel

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE
FUSED = "enginecast.attention.default"


def with_eager(config: Any) -> Any:
    config._attn_implementation = "eager"
    return config


def gemma_config() -> GemmaConfig:
    return GemmaConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=64,
        head_dim=SIZE,
    )


# Model, what the sites say, key-value heads.
MAKE: dict[str, tuple[Callable[[], nn.Module] | None, str, int]] = {
    "t5": (None, "tokens first", 4),
    "t5 eager": (
        lambda: Text(seeded(T5EncoderModel, with_eager(models.t5_config()))),
        "softmax attention; tokens first",
        4,
    ),
    "bert": (None, "tokens first", 4),
    "bert eager": (
        lambda: Text(seeded(BertModel, with_eager(models.bert_config()))),
        "softmax attention; tokens first",
        4,
    ),
    "vit": (None, "tokens first", 4),
    "llama": (None, "heads first", 2),
    "gemma": (lambda: Text(seeded(GemmaModel, gemma_config())), "heads first", 1),
}


@functools.cache
def program(name: str) -> ExportedProgram:
    """One that other files ask for too, or one that is this file's own."""
    make = MAKE[name][0]
    return tiny_program(name) if make is None else capture_model(name, make())


@functools.cache
def exact(name: str) -> ExportedProgram:
    return rewritten(program(name), "unify-dtype{to=fp64}")[0]


@pytest.mark.parametrize("name", ["t5", "bert eager"])
def test_attention_of_real_models_is_one_op_a_layer(name: str) -> None:
    _, note, kv_heads = MAKE[name]
    before = program(name)
    after, sites = rewritten(before, "canonicalize,fuse-attention")
    assert notes(sites) == [note] * 2
    fused = [n for n in after.graph.nodes if str(n.target) == FUSED]
    assert [n.args[4:6] for n in fused] == [(HEADS, kv_heads)] * 2
    assert (
        count(after, "scaled_dot_product_attention", "softmax", "matmul")
        <= (name == "llama") * 1 + (name == "gemma") * 1
    )
    if kv_heads != HEADS:
        assert count(after, "expand") < count(before, "expand")
    reference = exact(name)
    for shape in ((1, 2), (3, 7), (5, 31)):
        inputs = inputs_of(name, *shape)
        (expected,), (source,) = outputs(reference, *inputs), outputs(before, *inputs)
        values(after, *inputs)
        error = relative_error(outputs(after, *inputs)[0], expected)
        assert error <= 3 * relative_error(source, expected)
    inputs = inputs_of(name, 2, 9)
    assert same_bits(reloaded(after), after, *inputs)
    again, second = rewritten(after, "canonicalize,fuse-attention")
    assert not [site for site in second if site.rewritten]
    assert same_bits(again, after, *inputs)


@pytest.mark.parametrize("name", ["t5 eager"])
def test_a_compiler_that_knows_sdpa_gets_one_for_each_attention(name: str) -> None:
    before = program(name)
    after, sites = rewritten(before, "canonicalize,fuse-attention{to=sdpa}")
    assert [note.split("; ")[-1] for note in notes(sites)] == ["heads first"] * 2
    assert count(after, "scaled_dot_product_attention") == 2
    assert count(after, "enginecast.attention", "softmax") == 0
    inputs = inputs_of(name, 3, 7)
    (expected,), (source,) = outputs(exact(name), *inputs), outputs(before, *inputs)
    error = relative_error(outputs(after, *inputs)[0], expected)
    assert error <= 3 * relative_error(source, expected)


@pytest.mark.parametrize(
    ("name", "to"),
    [("t5", "fp32"), ("bert eager", "fp16")],
)
def test_padded_rows_stay_finite(name: str, to: str) -> None:
    before, _ = rewritten(program(name), f"unify-dtype{{to={to}}},canonicalize")
    after, _ = rewritten(before, "fuse-attention")
    ids, mask = prompts(3, 7)
    mask[1] = 0
    (found,) = outputs(after, ids, mask)
    (source,) = outputs(before, ids, mask)
    assert found.isfinite().all() == source.isfinite().all()
    assert found.isfinite().all()
    reference = exact(name)
    keep = mask.sum(1) > 0  # a row that sees nothing has no right answer
    (expected,) = outputs(reference, ids, mask)
    limit = 3 * relative_error(source[keep], expected[keep])
    assert relative_error(found[keep], expected[keep]) <= limit


def spelled(x: Tensor, *, scale: float = 1 / math.sqrt(SIZE), **options: Any) -> Any:
    """Attention over x itself, with one part of it changed."""
    heads = x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
    scores = heads @ heads.transpose(2, 3) * scale
    scores = options.get("scores", lambda s: s)(scores)
    weights = torch.softmax(scores, options.get("dim", -1))
    weights = options.get("weights", lambda w: w)(weights)
    out = (weights @ heads).transpose(1, 2).reshape(x.shape)
    return (out, scores * 2) if options.get("again") else out


def sdpa(x: Tensor, **options: Any) -> Tensor:
    heads = x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
    out = nn.functional.scaled_dot_product_attention(heads, heads, heads, **options)
    return out.transpose(1, 2).reshape(x.shape)


def program_of(function: Callable[..., Any], *inputs: Tensor) -> ExportedProgram:
    inputs = inputs or (torch.randn(2, 5, WIDTH),)
    return captured(Function(function), *inputs, dynamic=TOKENS)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another dim": (
        lambda x: spelled(x, dim=2),
        "the softmax is over dim 2, expected the last one",
    ),
    "scores read again": (
        lambda x: spelled(x, again=True),
        "mul.Tensor as the scores has 2 users (softmax, mul_1)",
    ),
    "masked by a select": (
        lambda x: spelled(x, scores=lambda s: torch.where(s > -9, s, -1e9)),
        "the scores come from where.ScalarOther, expected matmul",
    ),
    "soft cap": (
        lambda x: spelled(x, scores=lambda s: torch.tanh(s / 50) * 50),
        "the scores come from tanh.default, expected matmul",
    ),
    "dropout of the call": (lambda x: sdpa(x, dropout_p=0.5), "dropout of 0.5 is active"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_an_attention_is_left_alone_with_the_reason(name: str) -> None:
    function, reason = REFUSED[name]
    before = program_of(function)
    after, sites = rewritten(before, "fuse-attention")
    assert reasons(sites) == [reason]
    assert FUSED not in map(str, (n.target for n in after.graph.nodes))
    if "dropout" not in name:
        assert same_bits(before, after, torch.randn(3, 7, WIDTH))


def dropped(part: str) -> Callable[[Tensor], Tensor]:
    """Attention with an active dropout where an inert one is looked through."""

    def attend(x: Tensor) -> Tensor:
        def drop(name: str, value: Tensor) -> Tensor:
            return nn.functional.dropout(value, 0.5, training=name == part)

        query = drop("heads", x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2))
        few = x[..., : 2 * SIZE].unflatten(-1, (2, SIZE)).transpose(1, 2)
        expanded = few[:, :, None].expand(-1, -1, HEADS // 2, -1, -1)
        repeated = drop("repeated", expanded).flatten(1, 2)
        out = nn.functional.scaled_dot_product_attention(query, repeated, repeated)
        return drop("joined", drop("swapped", out).transpose(1, 2)).flatten(2)

    return attend


@pytest.mark.parametrize("part", ["heads"])
def test_active_dropout_beside_the_heads_stays(part: str) -> None:
    before = program_of(dropped(part))
    after, sites = rewritten(before, "canonicalize,fuse-attention")
    read = [n for n in after.graph.nodes if n.target is torch.ops.aten.dropout.default and n.users]
    assert len(read) == (part != "none")
    assert notes(sites) == ["tokens first" if part == "none" else "heads first"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: sdpa(x, is_causal=True),
        lambda x: spelled(x, scores=lambda s: s + x[:, None, :, :1] + x[:, None, :, 1:2]),
        lambda x: spelled(x, scores=lambda s: x[:, None, :, :1] + s),
        lambda x: spelled(x, scale=1.0, scores=lambda s: s / 3),
    ],
    ids=["causal", "two biases", "bias on the left", "divisor"],
)
def test_forms_that_fuse(function: Callable[[Tensor], Any]) -> None:
    before = program_of(function)
    after, sites = rewritten(before, "canonicalize,fuse-attention")
    assert len(notes(sites)) == 1
    assert count(after, "softmax", "scaled_dot_product_attention", "transpose") == 0
    for shape in ((1, 2, WIDTH), (3, 7, WIDTH)):
        x = torch.randn(shape)
        assert torch.allclose(outputs(after, x)[0], outputs(before, x)[0], atol=2e-6)


KEYS = (3, 2, 7, 4)
"""Batch, heads, tokens and size."""
BROADCAST: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]] = {
    "one key of the batch": (KEYS, (1, *KEYS[1:]), (), "query, key and value have different batch"),
    "query of rank 3": (KEYS[1:], KEYS, (), "the query has rank 3, expected 4"),
    "bias of rank 1": (KEYS, KEYS, (7,), "the bias has rank 1, expected 2 to 4"),
    "bias over more tokens": ((3, 2, 1, 4), KEYS, (7, 7), "the scores are broadcast to the bias"),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_what_broadcasts_otherwise_than_the_op_is_left_alone(name: str) -> None:
    query, key, bias, reason = BROADCAST[name]

    class Broadcasting(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
            return (q @ k.transpose(-1, -2) * 0.5 + bias).softmax(-1) @ v

    inputs = tuple(torch.randn(size) for size in (query, key, (3, *key[-3:]), bias))
    before = captured(Broadcasting(), *inputs)
    after, sites = rewritten(before, "canonicalize,fuse-attention")
    (found,) = reasons(sites)
    assert found.startswith(reason)
    assert same_bits(before, after, *inputs)


def test_golden_fuse_attention() -> None:
    before = program_of(lambda x: sdpa(x, scale=0.5))
    after, _ = rewritten(before, "fuse-attention")
    golden.check("fuse_attention.diff", ir_diff(before, after))
