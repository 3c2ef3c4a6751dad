"""Which outputs are proved not to depend on padding, and the reason where one is not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from enginecast.passes.analyses.padding.proof import Proof, prove_padding

WIDTH = 8
DIMS = {"batch": Dim("batch", max=8), "tokens": Dim("tokens", min=2, max=32)}
Forward = Callable[["Rows", Tensor, Tensor], Tensor]


class Rows(nn.Module):
    """Embeds token ids and then does what it is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.positions = nn.Embedding(32, WIDTH)
        self.then = forward

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.then(self, self.table(ids), mask)
        return found


def program_of(module: nn.Module, dtype: torch.dtype = torch.int64) -> ExportedProgram:
    example = torch.randint(2, 20, (3, 6)), torch.ones(3, 6, dtype=dtype)
    sizes = {0: DIMS["batch"], 1: DIMS["tokens"]}
    return torch.export.export(module.eval(), example, dynamic_shapes=(sizes, sizes))


def proof_of(forward: Forward, dtype: torch.dtype = torch.int64) -> Proof:
    return prove_padding(program_of(Rows(forward), dtype), "mask", ("out",))


def attention(hidden: Tensor, bias: Tensor) -> Tensor:
    scores = hidden @ hidden.transpose(1, 2) / WIDTH**0.5
    found: Tensor = (scores + bias).softmax(-1) @ hidden
    return found


def additive(mask: Tensor, least: float = torch.finfo(torch.float32).min) -> Tensor:
    return (1 - mask[:, None, :].float()) * least


def heads(hidden: Tensor) -> Tensor:
    return hidden.view(hidden.shape[0], hidden.shape[1], 2, 4).transpose(1, 2)


def fused(hidden: Tensor, bias: Tensor) -> Tensor:
    found = nn.functional.scaled_dot_product_attention(*(heads(hidden),) * 3, attn_mask=bias)
    return found.transpose(1, 2).reshape(hidden.shape)


def seen(length: int, extra: Tensor) -> Tensor:
    index = torch.arange(length)
    return (index[None, :] <= index[:, None]) & extra[:, None, None, :].bool()


def relative(hidden: Tensor) -> Tensor:
    index = torch.arange(hidden.shape[1])
    return (index[None, :] - index[:, None]).abs().clamp(max=5).float()[None]


ANYWHERE: dict[str, Forward] = {
    "rows alone": lambda m, h, mask: m.norm(m.linear(h).relu() * 2 + h),
    "additive mask": lambda m, h, mask: attention(h, additive(mask)),
    "masked_fill": lambda m, h, mask: (
        (h @ h.mT).masked_fill(mask[:, None, :] == 0, -torch.inf).softmax(-1) @ h
    ),
    "boolean mask": lambda m, h, mask: fused(h, mask[:, None, None, :].bool()),
    "mean over the mask": lambda m, h, mask: (
        (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    ),
    "largest over the mask": lambda m, h, mask: h.masked_fill(mask[..., None] == 0, -1e9).amax(1),
    "attention pooling": lambda m, h, mask: (
        ((h @ h.new_ones(WIDTH, 1) + (1 - mask[..., None].float()) * -3e38).softmax(1) * h).sum(1)
        * 1.0
    ),
    "positions of the mask": lambda m, h, mask: h + m.positions(mask.long().cumsum(1)),
    "causal and mask": lambda m, h, mask: fused(h, seen(h.shape[1], mask)),
    "alibi": lambda m, h, mask: attention(h, additive(mask) + relative(h).to(h.dtype) * -0.5),
}
RIGHT: dict[str, Forward] = {
    "positions": lambda m, h, mask: h + m.positions(torch.arange(h.shape[1])),
    "table of positions": lambda m, h, mask: h + m.positions.weight[: h.shape[1]],
    "first token": lambda m, h, mask: attention(h, additive(mask))[:, 0],
    "causal alone": lambda m, h, mask: fused(h, seen(h.shape[1], torch.ones_like(mask))),
    "triangle": lambda m, h, mask: attention(
        h, torch.triu(torch.full((h.shape[1],) * 2, -torch.inf), 1)[None]
    ),
    "running sum": lambda m, h, mask: h.cumsum(1),
    "attention to positions": lambda m, h, mask: nn.functional.scaled_dot_product_attention(
        h, h, places(h).expand(h.shape), attn_mask=mask[:, None, :].bool()
    ),
    "positions gathered": lambda m, h, mask: (
        places(h).expand(h.shape).gather(2, h.argmax(2, keepdim=True)) + h
    ),
}


def places(hidden: Tensor) -> Tensor:
    return torch.arange(hidden.shape[1], dtype=torch.float32)[None, :, None]


NOT: dict[str, tuple[Forward, str]] = {
    "no mask": (lambda m, h, mask: attention(h, h.new_zeros(1)), "no mask outweighs"),
    "-10": (lambda m, h, mask: attention(h, additive(mask, -10.0)), "no mask outweighs"),
    "mask turned around": (
        lambda m, h, mask: attention(h, mask[:, None, :].float() * -1e9),
        "no mask outweighs",
    ),
    "mask of queries": (
        lambda m, h, mask: fused(h, mask[:, None, :, None].bool().expand(-1, 1, -1, h.shape[1])),
        "attention may see padding",
    ),
    "mask without itself": (
        lambda m, h, mask: attention(
            h,
            additive(mask).masked_fill(torch.eye(h.shape[1]).bool(), -torch.inf),
        ),
        "nothing but padding",
    ),
    "numbers read from it": (lambda m, h, mask: h * h.sum().item(), "read from a tensor"),
    "a mask that wraps": (
        lambda m, h, mask: attention(h, (mask[:, None, :].to(torch.uint8) - 1).float() * 1e9),
        "no mask outweighs",
    ),
    "a mask rounded away": (
        lambda m, h, mask: attention(h, (1 - mask[:, None, :].float() + 1e8 - 1e8) * -1e9),
        "no mask outweighs",
    ),
    "scores larger than the mask": (
        lambda m, h, mask: attention(
            m.linear(h.masked_fill(mask[..., None] == 0, 1e9)), additive(mask, -1e9)
        ),
        "no mask outweighs",
    ),
    "zero times infinity": (
        lambda m, h, mask: (h.masked_fill(mask[..., None] == 0, -torch.inf) * mask[..., None]).sum(
            1
        ),
        "sum takes padding along",
    ),
    "sum": (lambda m, h, mask: h.sum(1), "sum takes padding along"),
    "batch mean": (lambda m, h, mask: h - h.mean(0), "mixes rows of the batch"),
    "length": (lambda m, h, mask: h * h.shape[1], "number of tokens"),
    "reversed": (lambda m, h, mask: h.flip(1), "flip takes padding along"),
    "last token": (lambda m, h, mask: h[:, -1], "select takes padding along"),
    "neighbors": (lambda m, h, mask: m.conv(h.transpose(1, 2)).transpose(1, 2), "neighbors"),
    "sorted": (lambda m, h, mask: h.sort(1).values, "sort takes padding along"),
    "computed place": (
        lambda m, h, mask: h[torch.arange(h.shape[0]), h[..., 0].argmax(1)],
        "argmax takes padding along",
    ),
    "a norm over tokens": (
        lambda m, h, mask: nn.functional.group_norm(h.transpose(1, 2), 2).transpose(1, 2),
        "a norm mixes tokens",
    ),
}


@pytest.mark.parametrize("name", ANYWHERE)
def test_padding_anywhere(name: str) -> None:
    found = proof_of(ANYWHERE[name])
    assert (found.side, found.outputs) == ("any", {"out": ""})


@pytest.mark.parametrize("name", RIGHT)
def test_padding_on_the_right(name: str) -> None:
    found = proof_of(RIGHT[name])
    assert (found.side, found.outputs) == ("right", {"out": ""})


@pytest.mark.parametrize("name", NOT)
def test_what_is_not_proved_says_why(name: str) -> None:
    forward, reason = NOT[name]
    found = proof_of(forward)
    assert found.side is None
    assert reason in found.outputs["out"]


def numbers(forward: Forward, ids: Tensor, mask: Tensor) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        found: Tensor = Rows(forward).eval()(ids, mask)
    return found if found.ndim == 2 else found.masked_fill(mask[..., None] == 0, 0.0)


@pytest.mark.parametrize("name", [*ANYWHERE, *RIGHT])
def test_what_is_proved_holds_in_eager(name: str) -> None:
    ids = torch.randint(2, 20, (3, 6), generator=torch.manual_seed(1))
    mask = (torch.arange(6) < torch.tensor([6, 2, 4])[:, None]).long()
    forward = ANYWHERE.get(name) or RIGHT[name]
    expected = numbers(forward, ids, mask)
    for left in (0, 3) if name in ANYWHERE else (0,):
        pad = nn.functional.pad
        found = numbers(forward, pad(ids, (left, 5), value=7), pad(mask, (left, 5)))
        found = found if found.ndim == 2 else found[:, left : left + 6]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "side"), [(torch.int64, "any"), (torch.bfloat16, None)])
def test_positions_that_a_dtype_rounds(dtype: torch.dtype, side: str | None) -> None:
    def forward(module: Rows, hidden: Tensor, mask: Tensor) -> Tensor:
        index = torch.arange(hidden.shape[1], dtype=dtype)
        return attention(hidden, additive(mask) + (index[None, :] - index[:, None]))

    example = torch.randint(2, 20, (3, 6)), torch.ones(3, 6, dtype=torch.int64)
    sizes = {0: DIMS["batch"], 1: Dim("many", min=2, max=512)}
    program = torch.export.export(Rows(forward).eval(), example, dynamic_shapes=(sizes, sizes))
    assert prove_padding(program, "mask", ("out",)).side == side
