"""What somebody would try first: caches, experts, boxes, RNNs, spectra, pools, odd sizes, 16 bits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, marks, normal, whole

CASES = Group("ordinary", "what anybody tries")
right, either = CASES.right, CASES.either
X, V, P = normal(3, 4, 8), normal(3, 8), normal(2, 3, 8, 8)
ROWS, TOKENS = ("x:0=1..12",), ("x:0=1..9", "x:1=1..17")
SIDES = ("x:0=1..4", "x:2=5..19", "x:3=5..19")


class Cache(nn.Module):
    """A buffer that is copied and then written to."""

    k: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(3, 16, 8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        k = self.k.clone()
        k[:, at] = self.inner(x)
        return (x @ k.mT).softmax(-1) @ k


class Past(nn.Module):
    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        k = torch.cat([past, x * 2], 1)
        return k, F.scaled_dot_product_attention(x, k, k)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).topk(2, -1)
        weights = torch.full_like(self.gate(x), float("-inf")).scatter(-1, chosen, best)
        return torch.einsum("bse,edf,bsd->bsf", weights.softmax(-1), self.experts, x)


class Sorted(Experts):
    """Rows in the order of their experts, and back."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        expert = self.gate(rows).argmax(-1)
        order = expert.argsort(stable=True)
        found = torch.bmm(rows[order][:, None], self.experts[expert[order]])[:, 0]
        return found[order.argsort()].view_as(x)


class Boxes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        low = x[:, :2]
        high = low + x[:, 2:4].abs()
        sides = torch.min(high[:, None], high) - torch.max(low[:, None], low)
        shared, area = sides.clamp(min=0).prod(-1), (high - low).prod(-1)
        return shared / (area[:, None] + area - shared + 1e-6)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.inner = kind(8, 6, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.plain = nn.GRUCell(8, 6), nn.LSTMCell(8, 6), nn.RNNCell(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = x.new_zeros(x.shape[0], 6)
        state = h, h
        for step in x.unbind(1):
            h, state = self.gru(step, h), self.lstm(step, state)
        return h, *state, self.plain(x[:, 0], h)


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.w, self.b = nn.Parameter(torch.randn(3, 8, 8)), nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        def one(w: Tensor, b: Tensor) -> Any:
            return torch.func.functional_call(self.inner, {"weight": w, "bias": b}, (x,))

        result: Tensor = torch.vmap(one)(self.w, self.b)
        return result


class Heads(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x)


right("cache that is copied", Cache, x=X, at=torch.arange(4))
right("past and present", Past, x=X, past=normal(3, 5, 8), dynamic=("x:1=1..9", "past:1=1..9"))
right("two of four experts", Experts, x=X, dynamic=TOKENS)
right("rows by expert", Sorted, x=X, dynamic=TOKENS)
right("boxes", Boxes, x=normal(6, 5), dynamic=ROWS)
right("cells", Cells, x=X, dynamic=("x:0=1..9",), is_quick=True)
right("ensemble", Ensemble, x=V, dynamic=ROWS)
right("weights of attention", Heads, x=X, dynamic=TOKENS)
right("keys of zeros", partial(Heads, add_bias_kv=True, add_zero_attn=True), x=X, dynamic=TOKENS)
for kind in (nn.RNN, nn.LSTM, nn.GRU):
    either(kind.__name__, partial(Recurrent, kind), x=X, dynamic=TOKENS)
for mode in ("sum", "prod", "mean", "amin", "amax"):
    right(
        f"scattered, {mode}",
        lambda self, x, i, mode=mode: torch.ones(4, 8).scatter_reduce(0, i, x, mode),
        x=V,
        i=whole(3, 8, high=4),
    )

OF_PICTURES: dict[str, Callable[[Tensor], Any]] = {
    "max, ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max, dilated": lambda x: F.max_pool2d(x, 2, dilation=2),
    "average, ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average without pads": lambda x: F.avg_pool2d(
        x, 3, 2, 1, ceil_mode=True, count_include_pad=False
    ),
    "average, divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "places of the largest": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "padded to fours": lambda x: F.pad(x, (0, -x.shape[-1] % 4, 0, -x.shape[-2] % 4)),
    "reflected to fours": lambda x: F.pad(x, (0, -x.shape[-1] % 4, 0, 0), mode="reflect"),
    "circular": lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "cropped": lambda x: F.pad(x, (-1, 2, 1, -2)),
    "windows": lambda x: x.unfold(2, 3, 2).unfold(3, 2, 1).sum((-1, -2)),
    "cubic to a size": lambda x: F.interpolate(x, size=(7, 11), mode="bicubic", antialias=True),
    "linear, 0.7": lambda x: F.interpolate(x, scale_factor=0.7, mode="bilinear"),
    "nearest exact, 1.7": lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
    "statistics of the batch": lambda x: F.batch_norm(x, None, None, training=True),
    "one channel": lambda x: F.group_norm(x[:, :1], 1),
    "neighbors": lambda x: F.local_response_norm(x, 2),
}
for name, forward in OF_PICTURES.items():
    add = either if name in ("nearest exact, 1.7", "adaptive", "average, divisor") else right
    add(name, lambda self, x, forward=forward: forward(x), x=P, dynamic=SIDES)

OF_TOKENS: dict[str, Callable[[Tensor], Any]] = {
    "einsum of three": lambda x: torch.einsum("bsd,btd,bud->bstu", x, x, x),
    "spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]),
    "spectrum over length": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "turned by a polar": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(*x.shape[:2], 4, 2)) * torch.polar(*2 * [torch.ones(4)])
    ),
    "alibi": lambda x: (
        x @ x.mT - (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs() / 2
    ).softmax(-1),
    "halves": lambda x: torch.cat([x[:, : x.shape[1] // 2].sum(1), x[:, x.shape[1] // 2 :].sum(1)]),
    "strided": lambda x: x[:, :: max(1, (x.shape[1] + 2) // 3)],
    "step by size": lambda x: x * torch.linspace(0, 1, x.shape[1])[:, None],
    "sums from the end": lambda x: x.flip(1).cumsum(1).flip(1),
    "nearest code": lambda x: torch.cdist(x, torch.eye(8)).argmin(-1),
    "vmap of vmap": lambda x: torch.vmap(torch.vmap(lambda r: r.softmax(0) * r.sum()))(x),
}
for name, forward in OF_TOKENS.items():
    right(name, lambda self, x, forward=forward: forward(x), x=X, dynamic=TOKENS)

HALVES: dict[str, Callable[[Tensor], Any]] = {
    "largest": lambda x: (x.amax(-1), x.amin(0), x.aminmax(dim=-1)),
    "products": lambda x: (x.prod(-1), x.cumprod(-1)),
    "running sums": lambda x: x.cumsum(1),
    "cosines": lambda x: F.cosine_similarity(x[:, None], x[None], dim=-1),
    "sums of numbers": lambda x: x.nansum(-1),
    "spread": lambda x: (x.var(-1), x.std(-1, correction=0)),
    "unit length": lambda x: F.normalize(x, dim=-1),
    "of little": lambda x: (x.abs().log1p(), x.expm1(), F.softplus(x)),
    "over a sum": lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-6),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "remainders": lambda x: (x % 2, x // 0.5, x.floor(), x.round()),
    "log of sums": lambda x: (x.logsumexp(-1), x.log_softmax(-1)),
    "gates": lambda x: (F.gelu(x), F.silu(x), F.mish(x)),
}
for precision in ("fp16", "bf16"):
    for name, forward in HALVES.items():
        right(
            f"{name} in {precision}",
            lambda self, x, forward=forward: forward(x),
            x=V,
            precision=precision,
        )


def _masked(self: Any, x: Tensor, m: Tensor) -> Tensor:
    scores = (x @ x.mT).masked_fill(~m[:, None], torch.finfo(x.dtype).min)
    return scores.softmax(-1)


for precision in ("fp32", "fp16", "bf16"):
    right(f"masked scores in {precision}", _masked, x=X, m=marks(3, 4), precision=precision)
