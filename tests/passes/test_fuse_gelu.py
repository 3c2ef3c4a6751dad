"""fuse-gelu: the spellings in use, quick-gelu left alone, errors against fp64."""

import math
from collections.abc import Callable
from typing import Any

import golden
import pytest
import torch
from programs import (
    count,
    ir_diff,
    notes,
    outputs,
    program_of,
    reasons,
    relative_error,
    reloaded,
    rewritten,
    same_bits,
)
from torch import Tensor
from transformers.activations import ACT2FN

Make = Callable[[Tensor], Any]

SPELLINGS: dict[str, tuple[Make, str]] = {
    "gelu_new": (ACT2FN["gelu_new"], "tanh"),
    "gelu_fast": (ACT2FN["gelu_fast"], "tanh"),
    "gelu_python": (ACT2FN["gelu_python"], "none"),
    "erf, halved last": (lambda x: 0.5 * (x * (1.0 + torch.erf(x / math.sqrt(2)))), "none"),
    "erf, halved first": (lambda x: (0.5 * x) * (torch.erf(x * math.sqrt(0.5)) + 1), "none"),
    "tanh, weight last": (
        lambda x: x * (torch.tanh(0.7978845608 * (x + x**3 * 0.044715)) + 1) * 0.5,
        "tanh",
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_become_one_gelu(name: str) -> None:
    function, form = SPELLINGS[name]
    before = program_of(function, torch.randn(2, 5))
    after, sites = rewritten(before, "canonicalize,fuse-gelu")
    assert notes(sites) == [f"gelu({form})"]
    assert count(after, "gelu") == 1
    assert count(after, "tanh", "erf", "mul", "pow", "add", "div") == 0
    x = torch.linspace(-9, 9, 256).reshape(8, 32)
    expected = torch.nn.functional.gelu(x.double(), approximate=form)
    assert relative_error(outputs(after, x)[0], expected) < 2e-7
    assert relative_error(outputs(before, x)[0], expected) < 2e-5  # rounded constants
    assert same_bits(reloaded(after), after, x)


REFUSED: dict[str, tuple[Make, str]] = {
    "another constant": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.9 * (x + 0.044715 * x**3))),
        "mul.Tensor under tanh has 0.9, expected 0.7978845608",
    ),
    "few digits": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3))),
        "mul.Tensor under tanh has 0.79788, expected 0.7978845608",
    ),
    "product with another value": (
        lambda x: 0.5 * x.abs() * (1 + torch.erf(x / math.sqrt(2))),
        "the product is not with half of the value under the core",
    ),
    "core read twice": (
        lambda x: ((t := torch.erf(x / math.sqrt(2))), 0.5 * x * (1 + t)),
        "erf.default after the core of a gelu has 2 users (add, output)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_a_gelu_is_left_alone_with_the_reason(name: str) -> None:
    function, reason = REFUSED[name]
    before = program_of(function, torch.randn(2, 5))
    after, sites = rewritten(before, "fuse-gelu")
    assert reasons(sites) == [reason]
    assert count(after, "gelu") == 0
    assert same_bits(before, after, torch.randn(3, 7))


def test_golden_fuse_gelu() -> None:
    before = program_of(SPELLINGS["erf, halved first"][0], torch.randn(2, 5))
    after, _ = rewritten(before, "fuse-gelu")
    golden.check("fuse_gelu.diff", ir_diff(before, after))
