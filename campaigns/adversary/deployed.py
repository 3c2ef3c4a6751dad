"""What is deployed: rows that values choose, lengths that may be nothing, sizes in formulas."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, normal, whole

CASES = Group("deployed", "rows that values choose, lengths of nothing, sizes in formulas")
right, either = CASES.right, CASES.either
X, V, P = normal(3, 4, 8), normal(3, 8), normal(2, 3, 8, 8)
TOKENS = ("x:0=1..9", "x:1=1..17")
Made = Callable[[], nn.Module]


class Layers(nn.Module):
    """A function of layers and of rows: of those that values choose, or of all but the first."""

    def __init__(self, forward: Callable[..., Any], layers: dict[str, Made], rows: str) -> None:
        super().__init__()
        self.do, self.rows = forward, rows
        for name, make in layers.items():
            setattr(self, name, make())

    def forward(self, x: Tensor) -> Any:
        if self.rows == "later":
            return self.do(self, x[:, 1:])
        rows = x.reshape(-1, x.shape[-1])
        return self.do(self, rows[rows.sum(-1) > 0])


def linear(columns: int = 8, wide: int = 8) -> Made:
    return partial(nn.Linear, columns, wide)


def attend(self: Any, x: Tensor) -> Any:
    parts = (part.unflatten(-1, (2, 4)).transpose(-3, -2) for part in self.a(x).chunk(3, -1))
    return self.b(F.scaled_dot_product_attention(*parts).transpose(-3, -2).flatten(-2))


def biased(self: Any, x: Tensor) -> Any:
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(-3, -2) for part in self.a(x).chunk(3, -1))
    places = torch.arange(x.shape[-2])
    scores = q @ k.transpose(-1, -2) * 0.5 + (places[:, None] - places).abs()
    return self.b((scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2))


OF_ROWS: dict[str, tuple[Callable[..., Any], dict[str, Made]]] = {
    "attention": (attend, {"a": linear(8, 24), "b": linear()}),
    "biased attention": (biased, {"a": linear(8, 24), "b": linear()}),
    "gated": (lambda s, x: s.b(F.silu(s.a(x)) * x), {"a": linear(), "b": linear()}),
    "norm and residual": (
        lambda s, x: s.b(s.n(x + s.a(x))) + x,
        {"a": linear(), "b": linear(), "n": partial(nn.RMSNorm, 8, eps=1e-6)},
    ),
    "median": (lambda s, x: x.median(-1), {}),
    "place": (lambda s, x: (x.argmax(-1), x.argmin(-1, keepdim=True)), {}),
    "ids": (lambda s, x: s.e(x.argmax(-1)), {"e": partial(nn.Embedding, 8, 5)}),
    "one hot": (lambda s, x: F.one_hot(x.argmax(-1), 8), {}),
    "repeated": (lambda s, x: x.repeat_interleave(2, -1), {}),
    "groups": (lambda s, x: F.group_norm(x.reshape(-1, 8), 2), {}),
    "spread": (lambda s, x: (x.std(-1), x.var(-1)), {}),
    "sorted": (lambda s, x: (x.sort(-1), x.topk(3, -1)[0]), {}),
    "sums": (lambda s, x: (x.cumsum(-1), x.logsumexp(-1)), {}),
    "turned": (lambda s, x: x.reshape(-1, 2, 4).mT.reshape(-1, 8), {}),
    "over others": (lambda s, x: (x @ x.mT).softmax(-1) @ x, {}),
}
for name, (forward, layers) in OF_ROWS.items():
    for rows in ("chosen", "later"):
        add = either if name == "sums" else right  # torch.export asks whether there is a row
        add(
            f"{name} of {rows} rows",
            partial(Layers, forward, layers, rows),
            x=X,
            dynamic=TOKENS,
            is_quick=rows == "chosen" and name == "place",
        )
WANTS: dict[str, tuple[Callable[..., Any], dict[str, Made]]] = {
    "convolved": (
        lambda s, x: s.c(x.mT[None]),
        {"c": partial(nn.Conv1d, 8, 6, 3, padding=1)},
    ),
    "resized": (lambda s, x: F.interpolate(x.mT[None], size=9, mode="linear"), {}),
    "spectrum": (lambda s, x: torch.fft.rfft(x).abs(), {}),
    "quantiles": (lambda s, x: x.quantile(0.3, -1), {}),
}
for name, (forward, layers) in WANTS.items():
    right(
        f"{name}, which wants a row",
        partial(Layers, forward, layers, "chosen"),
        x=X,
        dynamic=TOKENS,
        is_quick=name == "convolved",
    )
for precision in ("fp16", "bf16", "int8"):
    for name in ("attention", "gated", "norm and residual"):
        if (name, precision) == ("attention", "int8"):
            continue  # scores of large values saturate, and a rounding decides
        right(
            f"{name} of chosen rows in {precision}",
            partial(Layers, *OF_ROWS[name], "chosen"),
            x=X,
            dynamic=TOKENS,
            precision=precision,
        )

OF_LENGTH: dict[str, Callable[[Tensor], Any]] = {
    "root": lambda x: x / math.sqrt(x.shape[1]),
    "root of scores": lambda x: (x @ x.mT) * (1 / math.sqrt(x.shape[1])),
    "whole root": lambda x: x * int(math.sqrt(x.shape[1])),
    "rounded": lambda x: x[:, : round(x.shape[1] / 3) + 1],
    "twice, shifted": lambda x: x * (x.shape[1] << 1),
    "half, shifted": lambda x: x * (x.shape[1] >> 1),
    "low bits": lambda x: x * (x.shape[1] & 3),
    "a power": lambda x: x * x.shape[1] ** -0.5,
    "upwards": lambda x: x[:, : math.ceil(x.shape[1] / 2)],
    "to fours": lambda x: F.pad(x, (0, 0, 0, -x.shape[1] % 4)),
}
for name, of in OF_LENGTH.items():
    right(f"length: {name}", lambda self, x, of=of: of(x), x=X, dynamic=TOKENS)

IN_HALVES: dict[str, Callable[[Tensor], Any]] = {
    "logs": lambda x: ((x.abs() + 1).log2(), (x.abs() + 1).log10()),
    "degrees": lambda x: (x.deg2rad(), x.rad2deg()),
    "sinc": torch.sinc,
    "temperature": lambda x: (x / 0.07).softmax(-1),
    "distances": lambda x: torch.exp(-(x[:, None] - x[None]).pow(2).sum(-1)),
    "one over a norm": lambda x: F.normalize(x, dim=-1) * 100,
}
for precision in ("fp16", "bf16"):
    for name, of in IN_HALVES.items():
        right(f"{name} in {precision}", lambda self, x, of=of: of(x), x=V, precision=precision)


class Detects(nn.Module):
    """A head of boxes over a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 18, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        count, _, high, wide = y.shape
        y = y.view(count, 3, 6, high, wide).permute(0, 1, 3, 4, 2).sigmoid()
        rows, columns = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
        at = (y[..., :2] * 2 - 0.5 + torch.stack([columns, rows], -1)) * 8
        return torch.cat([at, (y[..., 2:4] * 2) ** 2, y[..., 4:]], -1).view(count, -1, 6)


def suppressed(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Matrix NMS: overlapping boxes decay."""
    score, order = x[:, 4].sigmoid().sort(descending=True, stable=True)
    low = (x[:, :2] - x[:, 2:4].exp() / 2)[order]
    high = (x[:, :2] + x[:, 2:4].exp() / 2)[order]
    shared = (torch.min(high[:, None], high) - torch.max(low[:, None], low)).clamp(min=0).prod(-1)
    area = (high - low).prod(-1)
    over = (shared / (area[:, None] + area - shared)).triu(1)
    decay = ((1 - over) / (1 - over.amax(0))[:, None]).amin(0)
    return torch.cat([low, high], -1), score * decay


def above(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    score = x[:, 4].sigmoid()
    boxes, score = x[score > 0.5, :4], score[score > 0.5]
    order = score.argsort(descending=True, stable=True)
    return boxes[order], score[order]


right("boxes of a grid", Detects, x=P, dynamic=("x:0=1..3", "x:2=2..12", "x:3=2..12"))
either("boxes that decay", suppressed, x=normal(6, 5), dynamic=("x:0=1..12",))
right("boxes above a score", above, x=normal(6, 5), dynamic=("x:0=1..12",))
right("counts", lambda self, i: torch.unique(i, return_counts=True), i=whole(7))
right("places of values", lambda self, i: torch.unique(i, return_inverse=True), i=whole(3, 4))
either("of given lengths", lambda self, x, n: x.repeat_interleave(n, 0), x=V, n=whole(3, high=4))
