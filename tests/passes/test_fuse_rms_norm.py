"""fuse-rms-norm: every spelling in use, the right reasons where it stops, errors against fp64."""

from collections.abc import Callable
from typing import Any

import golden
import models
import pytest
import torch
from programs import (
    LOW,
    TOKENS,
    captured,
    count,
    ir_diff,
    notes,
    outputs,
    reasons,
    relative_error,
    reloaded,
    rewritten,
    same_bits,
    values,
)
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from enginecast.passes.ir.edit import dtype_of

WIDTH = 32
REAL = [T5LayerNorm, LlamaRMSNorm, GemmaRMSNorm]


class Spelled(nn.Module):
    """A norm written by hand; `function` gets x and the weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


def statistic(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-6


def perturbed(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    norm.requires_grad_(False)
    for parameter in norm.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
        parameter[list(models.OUTLIER_CHANNELS)] *= models.OUTLIER_SCALE
    return norm.to(dtype).eval()


def sample(dtype: torch.dtype) -> Tensor:
    x = torch.randn(5, 19, WIDTH) * 3
    x[..., 7] *= 40
    return x.to(dtype)


def program_of(norm: nn.Module, dtype: torch.dtype = torch.float32) -> ExportedProgram:
    norm = perturbed(norm, dtype)
    return captured(norm, torch.randn(2, 5, WIDTH).to(dtype), dynamic=TOKENS)


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided by sqrt": lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w,
    "reciprocal of sqrt": lambda x, w: w * (x * torch.sqrt(statistic(x)).reciprocal()),
    "square": lambda x, w: x * torch.rsqrt(x.square().mean(2, keepdim=True) + 1e-6) * w,
    "no weight": lambda x, w: x * torch.rsqrt(statistic(x)),
}


def check_against_fp64(before: ExportedProgram, after: ExportedProgram, x: Tensor) -> None:
    reference, _ = rewritten(before, "unify-dtype{to=fp64}")
    (expected,) = outputs(reference, x)
    (source,), (fused,) = outputs(before, x), outputs(after, x)
    values(after, x)
    assert fused.dtype == source.dtype
    limit = 1.05 * relative_error(source, expected)
    if x.dtype == torch.float32:
        limit = max(limit, 2**-23)  # half a last place more: another order of the same products
    assert relative_error(fused, expected) <= limit


@pytest.mark.parametrize(
    ("norm", "precision"),
    [(norm, precision) for norm in REAL for precision in ("fp32", "fp16")],
)
def test_norms_of_real_models(norm: type[nn.Module], precision: str) -> None:
    dtype = LOW[precision]
    before = program_of(norm(WIDTH, eps=1e-6), dtype)
    after, sites = rewritten(before, "canonicalize,fuse-rms-norm")
    assert count(after, "rms_norm") == 1
    assert count(after, "pow", "mean", "rsqrt") == 0
    (note,) = notes(sites)
    gemma = "Gemma" in norm.__name__
    moved = dtype != torch.float32 and not gemma
    assert ("moved behind it" in note) == moved
    (fused,) = [n for n in after.graph.nodes if "rms_norm" in str(n.target)]
    assert dtype_of(fused) == (torch.float32 if gemma else dtype)
    assert {dtype_of(source) for source in fused.all_input_nodes} == {dtype_of(fused)}
    check_against_fp64(before, after, sample(dtype))
    assert same_bits(reloaded(after), after, sample(dtype))


@pytest.mark.parametrize("name", SPELLINGS)
def test_norms_written_by_hand(name: str) -> None:
    before = program_of(Spelled(SPELLINGS[name]))
    after, sites = rewritten(before, "canonicalize,fuse-rms-norm")
    assert (count(after, "rms_norm"), len(sites)) == (1, 1)
    assert count(after, "mean", "sqrt", "rsqrt") == 0
    check_against_fp64(before, after, sample(torch.float32))
    _, sites = rewritten(after, "fuse-rms-norm")
    assert not sites


def test_statistic_in_the_low_dtype_moves_to_fp32_and_says_so() -> None:
    before = program_of(Spelled(SPELLINGS["no weight"]), torch.bfloat16)
    after, sites = rewritten(before, "canonicalize,fuse-rms-norm")
    assert notes(sites) == ["the statistic, in the low dtype before, is fp32 now"]
    check_against_fp64(before, after, sample(torch.bfloat16))


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "another dim": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w,
        "the mean is over dims [1], expected the last one, kept",
    ),
    "two dims": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6) * w,
        "the mean is over dims [1, 2], expected the last one, kept",
    ),
    "no product": (
        lambda x, w: torch.rsqrt(statistic(x)) + w,
        "add.Tensor reads the reciprocal root, expected a product with the value",
    ),
    "divided the other way": (
        lambda x, w: torch.sqrt(statistic(x)) / x,
        "no division of the measured value by the root follows",
    ),
    "epsilon with a factor": (
        lambda x, w: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1e-6, alpha=3)),
        "no reciprocal root over mean + epsilon follows the mean of squares",
    ),
    "a size that varies": (
        lambda x, w: (y := x.flatten(1)) * torch.rsqrt(statistic(y)),
        "the size that the norm is over varies",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_a_norm_is_left_alone_with_the_reason(name: str) -> None:
    function, reason = REFUSED[name]
    before = program_of(Spelled(function))
    after, sites = rewritten(before, "fuse-rms-norm")
    assert reasons(sites) == [reason]
    assert count(after, "rms_norm") == 0
    assert same_bits(before, after, sample(torch.float32))


def test_golden_fuse_rms_norm() -> None:
    before, _ = rewritten(program_of(T5LayerNorm(WIDTH), torch.float16), "canonicalize")
    after, _ = rewritten(before, "fuse-rms-norm")
    golden.check("fuse_rms_norm.diff", ir_diff(before, after))
