"""append-cache: attention that joins past and new keys itself, as ONNX Runtime computes it."""

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import golden
import onnx_ir as ir
import pytest
import torch
from lowering import error, lower, noise, run
from programs import Function, captured, ir_diff, outputs, reasons, rewritten
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.library import opcheck

from enginecast.exporters.onnx.lower import GRAPH_FILE, lowering
from enginecast.exporters.onnx.ops.attention import FEW_TOKENS, MANY_ROWS
from enginecast.exporters.onnx.ops.registry import READERS
from enginecast.testing import capture, check_mutations, compare, run_passes
from enginecast.verification.emulate.kernels import KERNELS

ops = torch.ops.enginecast
SIZE = 8
LIMIT = 3.0
SPEC = "append-cache"
Inputs = tuple[Tensor, ...]


class Attends(torch.nn.Module):
    """One layer of a decoder between its projections, and the cache that it returns."""

    def __init__(self, heads: int, kv_heads: int, change: Any = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.change = heads, kv_heads, change

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, mask: Tensor
    ) -> list[Tensor]:
        torch._check(past_v.shape[2] == past_k.shape[2])
        torch._check(mask.shape[3] == past_k.shape[2] + k.shape[2])
        keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], -2)
        if self.change is not None:
            mask = self.change(mask, keys)
        found = ops.attention(q, keys, values, mask, self.heads, self.kv_heads, 0.35, False)
        return [found, keys, values]


def of_bools(mask: Tensor, heads: int) -> Tensor:
    """As Llama, Qwen and GPT-2 have it: [batch, 1, tokens, keys]."""
    return mask


def of_distances(mask: Tensor, heads: int) -> Tensor:
    """As T5 has it: a bias for each head, and the mask in it."""
    draw = torch.Generator().manual_seed(2)
    bias = torch.randn(1, heads, *mask.shape[2:], generator=draw)
    return bias.masked_fill(~mask, -1e9)


def of_one_text(mask: Tensor, heads: int) -> Tensor:
    """A bias for each head, and no padding: all rows have the same."""
    return of_distances(mask[:1], heads)


def sizes(rows: int, tokens: int, past: int, heads: int, kv_heads: int, masked: Any) -> Inputs:
    """Inputs with outliers, padded on the left: the last row sees its own last token alone."""
    draw = torch.Generator().manual_seed(rows + 10 * tokens + past)
    shapes = [(heads, tokens), *[(kv_heads, tokens)] * 2, *[(kv_heads, past)] * 2]
    found = [torch.randn(rows, *shape, SIZE, generator=draw) for shape in shapes]
    for tensor in found:
        tensor[..., 0] *= 6
    seen = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
    mask = seen.repeat(rows, 1, 1, 1)
    mask[-1, ..., : past + tokens - 1] = False
    return (*found, masked(mask, heads))


def program_of(heads: int, kv_heads: int, masked: Any, change: Any = None) -> ExportedProgram:
    rows, tokens, past = (Dim(name, min=0 if name == "past" else 1) for name in ("b", "s", "p"))
    new = {0: rows, 2: tokens}
    before = {0: rows, 2: past}
    mask = {0: rows} if masked is not of_one_text else {}
    return captured(
        Attends(heads, kv_heads, change),
        *sizes(3, 5, 7, heads, kv_heads, masked),
        dynamic=(new, new, new, before, before, {**mask, 2: tokens, 3: Dim.AUTO}),
    )


LIKE: Mapping[str, tuple[int, int, Callable[..., Tensor]]] = {
    "llama": (16, 8, of_bools),
    "gpt2": (4, 4, of_bools),
    "t5": (4, 4, of_distances),
}


def test_attention_takes_the_past(tmp_path: Path) -> None:
    program = program_of(*LIKE["llama"])
    after, sites = rewritten(program, SPEC)
    assert [site.rewritten for site in sites] == [True]
    golden.check("append_cache.diff", ir_diff(program, after))
    given = sizes(2, 3, 4, *LIKE["llama"])
    for found, wanted in zip(outputs(after, *given), outputs(program, *given), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", LIKE)
def test_engines_are_as_exact_as_torch_for_all_sizes(tmp_path: Path, name: str) -> None:
    heads, kv_heads, masked = LIKE[name]
    names = ["out", "keys", "values"]
    lowered = lower(program_of(heads, kv_heads, masked), tmp_path, names)
    assert lowered.ops["Attention"] == 1
    (node,) = [n for n in ir.load(tmp_path / GRAPH_FILE).graph if n.op_type == "Attention"]
    assert [value.name for value in node.outputs][1:] == names[1:]
    module = Attends(heads, kv_heads)
    rows, tokens = (1, MANY_ROWS - 1, MANY_ROWS, 9), (1, FEW_TOKENS, FEW_TOKENS + 1, 30)
    for sizes_ in product(rows, tokens, (0, 7)):
        given = sizes(*sizes_, heads, kv_heads, masked)
        found, *kept = run(tmp_path, *given)
        plain, *joined = module(*given)
        wide = [x.double() if x.is_floating_point() else x for x in given]
        exact = module(*wide)[0]
        assert error(found, exact) <= LIMIT * noise(exact, plain), sizes_
        assert all(torch.equal(*pair) for pair in zip(kept, joined, strict=True)), sizes_


def test_every_fault_in_the_op_is_noticed() -> None:
    heads = LIKE["llama"]
    given = sizes(3, 5, 7, *heads)
    outcome = run_passes(capture(Attends(*heads[:2]), *given), SPEC)
    cases = [sizes(3, 5, 7, *heads), tuple(x * 2 if x.is_floating_point() else x for x in given)]
    check = compare(outcome, cases)
    assert check.rewritten == 1
    assert len(check_mutations(outcome).noticed) >= 2


def _causal(q: Tensor, k: Tensor, past: Tensor) -> list[Tensor]:
    keys = torch.cat([past, k], 2)
    return [ops.attention(q, keys, keys, None, 4, 4, 0.3, True), keys]


def _in_three(q: Tensor, k: Tensor, past: Tensor) -> list[Tensor]:
    keys = torch.cat([past, k, k], 2)
    return [ops.attention(q, keys, keys, None, 4, 4, 0.3, False), keys]


def _beside(q: Tensor, k: Tensor, past: Tensor) -> list[Tensor]:
    keys = torch.cat([past[..., :3], k[..., 3:]], 3)
    return [ops.attention(q, keys, keys, None, 4, 4, 0.3, False), keys]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_causal, "it is causal from the first key on, and the op from the last one"),
        (_in_three, "the keys are joined of 3 parts, expected 2"),
        (_beside, "the keys are joined along dim 3, expected the tokens"),
    ],
)
def test_what_is_no_cache_is_left_alone(function: Any, reason: str) -> None:
    q = torch.randn(2, 4, 6, SIZE)
    program = captured(Function(function), q, q + 1, q * 2)
    after, sites = rewritten(program, SPEC)
    assert reasons(sites) == [reason]
    assert ir_diff(program, after) == ""


@pytest.mark.parametrize("reader", READERS)
def test_only_the_kernels_of_onnxruntime_on_a_cpu_append(reader: Any) -> None:
    assert (SPEC in lowering(reader)) == (reader == "onnxruntime-cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_op_and_its_emulation_are_what_they_say(dtype: torch.dtype) -> None:
    *given, mask = sizes(2, 3, 4, 6, 2, of_bools)
    args = (*(x.to(dtype) for x in given), mask, 0.35)
    opcheck(ops.cached_attention.default, args)
    _, kernel = KERNELS[ops.cached_attention.default]
    query, key, new, past_key, past_value = (x.to(dtype) for x in given)
    keys, values = torch.cat([past_key, key], 2), torch.cat([past_value, new], 2)
    plain = KERNELS[ops.attention.default][1]
    wanted = plain(query, keys, values, mask, 6, 2, 0.35, False)
    for found, same in zip(kernel(*args), (wanted, keys, values), strict=True):
        assert torch.equal(found, same)
