"""Our fused ops as plain ones, with the values that they have."""

from collections.abc import Callable

import pytest
import torch
from programs import TOKENS, Function, captured, count, outputs, program_of, rewritten
from torch import Tensor
from torch.export import Dim, ExportedProgram

from enginecast.passes.ir.blocks import all_nodes

ours = torch.ops.enginecast


def plain(program: ExportedProgram) -> ExportedProgram:
    copy, _ = rewritten(program, "decompose-fused")
    assert not [n for n in all_nodes(copy) if "enginecast" in str(n.target)]
    return copy


def flat(x: Tensor) -> Tensor:
    """8 query heads of size 4 in [batch, tokens, 32], 2 of keys and values."""
    found: Tensor = ours.attention(x, x[..., :8], x[..., 8:16], None, 8, 2, 0.3, False)
    return found


def masked(x: Tensor) -> Tensor:
    mask = (x.sum(-1) > 0)[:, None, None, :] | torch.eye(x.shape[1], dtype=torch.bool)
    found: Tensor = ours.attention(x, x, x, mask, 4, 4, 0.5, False)
    return found


def biased(x: Tensor) -> Tensor:
    bias = x[:, :, :1] - x[:, None, :, 0]
    found: Tensor = ours.attention(x, x, x, bias.unsqueeze(1), 4, 4, 0.5, False)
    return found


def causal(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
    found: Tensor = ours.attention(heads, heads, heads, None, 4, 4, 0.2, True)
    return found


def normed(x: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = ours.skip_rms_norm(x, x * 3, x[0, 0].abs(), 1e-3)
    return found


def only_the_norm(x: Tensor) -> Tensor:
    found: Tensor = ours.skip_rms_norm(x, x + 1, torch.ones(32, dtype=x.dtype), 1e-3)[0]
    return found


@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize(
    "function", [flat, masked, biased, causal, normed, only_the_norm], ids=lambda f: f.__name__
)
def test_plain_ops_compute_what_ours_do(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    program = program_of(function, torch.randn(3, 7, 32, dtype=dtype))
    found = plain(program)
    for shape in ((3, 7, 32), (1, 9, 32)):
        x = torch.randn(*shape, dtype=dtype)
        for got, wanted in zip(outputs(found, x), outputs(program, x), strict=True):
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_attention_becomes_one_sdpa_of_heads_in_groups() -> None:
    program = plain(program_of(flat, torch.randn(3, 7, 32)))
    (node,) = [n for n in program.graph.nodes if "scaled_dot" in str(n.target)]
    assert dict(node.kwargs) == {"scale": 0.3, "enable_gqa": True}
    assert count(program, "unflatten", "flatten") == 4


def test_ops_within_branches_are_taken_apart_too() -> None:
    def choose(x: Tensor) -> Tensor:
        found: Tensor = torch.cond(
            x.sum() > 0,
            lambda y: ours.skip_rms_norm(y, y, torch.ones(32), 1e-3)[0],
            lambda y: y - 1.0,
            (x,),
        )
        return found

    program = captured(
        Function(choose), torch.rand(3, 7, 32), dynamic={**TOKENS, 1: Dim("s", min=2, max=32)}
    )
    found = plain(program)
    assert any("rms_norm" in str(node.target) for node in all_nodes(found))
    for x in (torch.rand(2, 3, 32), -torch.rand(2, 3, 32)):
        torch.testing.assert_close(outputs(found, x), outputs(program, x), rtol=0, atol=0)
