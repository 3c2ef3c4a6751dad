"""exact-position-buckets: the table is the function at every distance, or the pass says why not."""

import math
from collections.abc import Callable
from typing import Any

import golden
import pytest
import torch
from programs import (
    Function,
    captured,
    count,
    ir_diff,
    notes,
    outputs,
    reasons,
    rewritten,
    same_bits,
)
from torch import Tensor
from torch.export import Dim, ExportedProgram
from transformers.models.t5.modeling_t5 import T5Attention

from enginecast.passes.ir.edit import aten

pytestmark = pytest.mark.all_sizes

MOST = 600
TOKENS = {0: Dim("batch", min=1, max=4), 1: Dim("sequence", min=2, max=MOST)}
BUCKETS = "canonicalize,exact-position-buckets"


def distances(x: Tensor) -> Tensor:
    """Key position minus query position: int [tokens, tokens]."""
    places = torch.arange(x.shape[1])
    return places[None, :] - places[:, None]


def t5_bucket(distance: Tensor, *, both: bool = True, count: int = 32, far: int = 128) -> Tensor:
    """The library's own function."""
    found: Tensor = T5Attention._relative_position_bucket(distance, both, count, far)
    return found


def program_of(function: Callable[[Tensor], Any], dynamic: Any = TOKENS) -> ExportedProgram:
    return captured(Function(function), torch.randn(2, 7), dynamic=dynamic)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "t5": t5_bucket,
    "causal": lambda d: t5_bucket(d, both=False),
    "deberta": lambda d: torch.where(
        d.abs() <= 8, d, (torch.log(d.abs() / 8) / math.log(511 / 8) * 7).ceil().long() * d.sign()
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_distance_has_the_bucket_of_the_source(name: str) -> None:
    function = FUNCTIONS[name]
    before = program_of(lambda x: function(distances(x)))
    after, sites = rewritten(before, BUCKETS)
    assert len(notes(sites)) == 1
    assert count(after, "log", "div", "where", "abs") == 0
    # The longest text has every distance from -599 to 599; each is compared.
    for tokens in (2, 7, 130, MOST):
        assert same_bits(before, after, torch.randn(1, tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_table_holds_where_a_logarithm_of_a_low_dtype_does_not(dtype: torch.dtype) -> None:
    """In bf16 some distances change their bucket: what the pass makes impossible."""
    distance = torch.arange(-MOST + 1, MOST)
    exact = t5_bucket(distance)
    near = distance.abs()
    low = 8 + ((near / 8).to(dtype).log() / math.log(16) * 8).long()
    low = torch.where(near < 8, near, low.clamp(max=15)) + (distance > 0) * 16
    flips = int((low != exact).sum())
    assert (flips > 0) == (dtype is torch.bfloat16)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a value of the input": (
        lambda x: t5_bucket(x.long()[:, None]),
        "nothing bounds the distance, which comes from unsqueeze.default",
    ),
    "a logarithm of the input": (
        lambda x: x.log(),
        "the logarithm is of placeholder, which is not an integer",
    ),
    "read halfway": (
        lambda x: ((y := torch.log(distances(x).abs() + 1.0)), (y * 2).long()),
        "2 values of the bucket are read elsewhere (log, to)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_a_bucket_is_left_alone_with_the_reason(name: str) -> None:
    function, reason = REFUSED[name]
    before = program_of(function)
    after, sites = rewritten(before, BUCKETS)
    assert reasons(sites) == [reason]
    assert count(after, "log") == 1


def test_a_wrong_table_is_seen() -> None:
    """One entry off by one changes outputs: the comparisons above can fail."""
    before = program_of(lambda x: t5_bucket(distances(x)))
    after, _ = rewritten(before, BUCKETS)
    [name] = [name for name in after.constants if "position_buckets" in name]
    after.constants[name] = (
        after.constants[name]
        .clone()
        .index_add_(0, torch.tensor([90]), torch.ones(1, dtype=torch.int64))
    )
    x = torch.randn(1, 7)
    assert not torch.equal(outputs(before, x)[0], outputs(after, x)[0])


def test_golden_exact_position_buckets() -> None:
    before, _ = rewritten(program_of(lambda x: t5_bucket(distances(x))), "canonicalize")
    after, _ = rewritten(before, "exact-position-buckets")
    assert any(node.target is aten.clamp.default for node in after.graph.nodes)
    golden.check("exact_position_buckets.diff", ir_diff(before, after))
