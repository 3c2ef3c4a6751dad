"""Writes in place: before, between and after what a pass fuses or reads twice."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, marks, normal, whole

CASES = Group("writes", "a write in place around a fusion or a view")
right, either = CASES.right, CASES.either
X = normal(2, 5, 8)


class RmsWrite(nn.Module):
    """The product sees what was written after the statistic was taken."""

    def __init__(self, where: str = "between") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        if self.where == "before":
            x[:, 0] = 2.0
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.where == "between":
            x.add_(1.0)
        if self.where == "statistic":
            scale.mul_(0.5)
        if self.where == "slice":
            x[:, :2] *= 3.0
        if self.where == "view":
            x.view(-1)[:7].fill_(0.25)
        out = x * scale
        if self.where == "after":
            x.zero_()
        if self.where == "product":
            out[..., 0] = 0.0
        return self.weight * out + x


class LayerWrite(nn.Module):
    def __init__(self, where: str = "between") -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5
        mean = x.mean(-1, keepdim=True)
        if self.where == "mean":
            mean.clamp_(max=0.1)
        centered = x - mean
        if self.where == "centered":
            centered[..., 1] = 0.0
        variance = centered.pow(2).mean(-1, keepdim=True)
        if self.where == "between":
            centered.mul_(2.0)
        if self.where == "variance":
            variance += 0.3
        return centered / torch.sqrt(variance + 1e-5)


class AttentionWrite(nn.Module):
    def __init__(self, where: str = "query") -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.reshape(x.shape[0], -1, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        if self.where == "key":
            k = k.clone()
        scores = q @ k.transpose(-1, -2) / 2.0
        if self.where == "query":
            q.zero_()
        if self.where == "key":
            k[:, :, 0] = 5.0
            scores = scores + q @ k.transpose(-1, -2)
        if self.where == "scores":
            scores[..., 0] = -1.0
        if self.where == "mask":
            scores.masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        weights = scores.softmax(-1)
        if self.where == "weights":
            weights[..., -1] = 0.0
        if self.where == "value":
            v.mul_(2.0)
        return (weights @ v + q * 0.1).transpose(1, 2).flatten(2)


class SdpaWrite(nn.Module):
    """Written to after it was read; what was read must stay."""

    def __init__(self, where: str = "mask") -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Any:
        q = x.unsqueeze(1) * 2
        k, v = q + 1, q - 1
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        if self.where == "mask before":
            mask[0, 1:] = False
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.where == "mask":
            mask[:, 0] = False
        if self.where == "value":
            v[..., 0] = 0.0
        if self.where == "query":
            q += 3.0
        again = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out, again


class GeluWrite(nn.Module):
    def __init__(self, where: str = "half") -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0001
        half = x * 0.5
        if self.where == "input":
            x[..., :2] = 1.0
        inner = torch.erf(x / 1.4142135623730951)
        if self.where == "inner":
            inner.clamp_(min=-0.5)
        if self.where == "half":
            half.add_(0.25)
        if self.where == "after":
            x.fill_(0.0)
        return half * (1.0 + inner)


class TanhGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 0.0
        inner = 0.7978845608028654 * (y + 0.044715 * y.pow(3))
        y.mul_(-1.0)
        return 0.5 * y * (1.0 + torch.tanh(inner))


class SkipWrite(nn.Module):
    """The sum goes on to a norm and is written to before the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.inner(x)
        normed = self.norm(total)
        total[:, 0] += 1.0
        return normed + total


class ClampedResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h[:, 0].clamp_(max=0.2)
        return self.linear(h) + h


class Buffered(nn.Module):
    """A buffer is a scratch pad that each call writes over."""

    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.zeros(2, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.scratch.copy_(x)
        self.scratch[:, 0] = 1.0
        return self.scratch * 2.0


class Linears(nn.Module):
    """Three layers of one input, which is written to between the second and the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        a, b = self.a(x), self.b(x)
        x[..., 3] = 7.0
        return torch.cat([a, b, self.c(x)], -1)


class GroupNormWrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2).contiguous()
        z = self.norm(y)
        y.sub_(z)
        return z * torch.sigmoid(y)


for at in ("before", "between", "statistic", "slice", "view", "after", "product"):
    right(f"rms norm, {at}", partial(RmsWrite, at), x=X)
for at in ("mean", "centered", "between", "variance"):
    right(f"layer norm, {at}", partial(LayerWrite, at), x=X)
for at in ("query", "key", "scores", "mask", "weights", "value"):
    right(f"attention, {at}", partial(AttentionWrite, at), x=X)
for at in ("mask", "mask before", "value", "query"):
    right(f"scaled dot product, {at}", partial(SdpaWrite, at), x=X)
for at in ("input", "inner", "half", "after"):
    right(f"gelu, {at}", partial(GeluWrite, at), x=X)
right("tanh gelu", TanhGelu, x=X)
right("skip norm", SkipWrite, x=X)
right("clamped residual", ClampedResidual, x=X)
right("clamped residual in fp16", ClampedResidual, x=X, precision="fp16")
either("scratch buffer", Buffered, x=X)
right("three linears", Linears, x=X)
right("group norm", GroupNormWrite, x=X)


def swap(self: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    first = y[:, 0]
    y[:, 0] = y[:, 1]
    y[:, 1] = first  # a view of what was just written
    return y


def transpose_add(self: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y.transpose(1, 2)[:, 0].add_(x[..., 0])
    return y


def through_views(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 1.0
    rows = y.view(-1, 8)
    rows[::2].mul_(2.0)
    y[:, :, ::3] -= 1.0
    return rows + y.reshape(-1, 8)


def expanded(self: nn.Module, x: Tensor) -> Tensor:
    base = torch.zeros(x.shape[0], 1, 8)
    base += x.mean(1, keepdim=True)
    return base.expand_as(x) + x


def read_before_and_after(self: nn.Module, x: Tensor) -> Any:
    y = x.sin()
    before = y[:, 1] + 0
    alias = y[:, 1]
    y[:, 1] = 9.0
    return before, alias, y


def loop(self: nn.Module, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i in range(1, 5):
        out[:, i] = out[:, i - 1] * 0.5 + x[:, i]
    return out


def masked(self: nn.Module, x: Tensor, m: Tensor) -> Tensor:
    y = x.exp()
    y[m] = -1.0
    return y.log1p()


def accumulate(self: nn.Module, x: Tensor, i: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], 6)
    y.index_put_((torch.arange(x.shape[0]), i), x[:, 0], accumulate=True)
    y.index_put_((torch.arange(x.shape[0]), i), x[:, 1], accumulate=True)
    return y


right("swap by views", swap, x=X)
right("write to a transpose", transpose_add, x=X)
right("two views", through_views, x=X)
right("write then expand", expanded, x=X)
right("alias read later", read_before_and_after, x=X)
right("recurrence in place", loop, x=X)
right("masked write", masked, x=X, m=marks(2, 5, 8))
right("accumulated write", accumulate, x=normal(3, 4), i=whole(3, high=6))
right("relu in place", lambda self, x: F.relu(y := x * 2, inplace=True) + y, x=X)
right("dropout in place in eval", lambda self, x: F.dropout(y := x * 2, 0.5, False, True) + y, x=X)
right(
    "silu in place twice",
    lambda self, x: F.silu(F.silu(y := x + 1, inplace=True), inplace=True) * y,
    x=X,
)
right("add to a slice", lambda self, x: (y := x.clone(), y[:, 1:].add_(x[:, :-1]), y)[-1], x=X)
right("overlapping copy", lambda self, x: (y := x.clone(), y[:, 1:].copy_(x[:, :-1]), y)[-1], x=X)
either(
    "fill diagonal",
    lambda self, x: (y := x[:, :, :5].clone(), [y[b].fill_diagonal_(0.0) for b in range(2)], y)[-1],
    x=X,
)
right(
    "scatter in place",
    lambda self, x: (y := x.clone(), y.scatter_(2, y.argmax(-1, keepdim=True), -5.0), y)[-1],
    x=X,
)
right(
    "scatter add in place",
    lambda self, x, i: torch.zeros(2, 5, 4).scatter_add_(2, i, x),
    x=X,
    i=whole(2, 5, 8, high=4),
)
right(
    "index fill",
    lambda self, x: (y := x.clone(), y.index_fill_(1, torch.tensor([0, 3]), 2.0), y)[-1],
    x=X,
)
right(
    "index copy",
    lambda self, x: torch.zeros(2, 5, 8).index_copy_(1, torch.tensor([4, 0]), x[:, :2]),
    x=X,
)
right(
    "index add twice the same",
    lambda self, x: torch.zeros(2, 3, 8).index_add_(1, torch.tensor([0, 2, 0, 1, 0]), x),
    x=X,
)
right("out of an operator", lambda self, x: torch.add(x, 1, out=torch.empty_like(x)), x=X)
right("zero a view of a chunk", lambda self, x: (y := x * 3, y.chunk(2, -1)[1].zero_(), y)[-1], x=X)
right(
    "write to a split",
    lambda self, x: (y := x * 3, y.split([3, 5], -1)[0].add_(1), y.sum(-1))[-1],
    x=X,
)
right("write to unbind", lambda self, x: (y := x * 3, y.unbind(1)[2].neg_(), y)[-1], x=X)
right(
    "write to a diagonal",
    lambda self, x: (y := x[..., :5] * 3, y.diagonal(dim1=1, dim2=2).add_(1), y)[-1],
    x=X,
)
right(
    "write to select of view",
    lambda self, x: (y := x * 3, y.view(2, 5, 2, 4)[:, :, 1].mul_(0), y)[-1],
    x=X,
)
right(
    "write to permute and flatten",
    lambda self, x: (y := x * 3, y.permute(2, 0, 1).flatten(1)[0].zero_(), y)[-1],
    x=X,
)
right("write a size into", lambda self, x: (y := x * 3, y[:, 0].fill_(x.shape[0]), y)[-1], x=X)
right(
    "sum of an alias",
    lambda self, x: (y := x * 3, z := y.t() if y.dim() == 2 else y.mT, z.add_(1), y.sum(1))[-1],
    x=X,
)
either("write to the input", lambda self, x: x.add_(1.0) * 2, x=X)
either("write to the input's slice", lambda self, x: (x[:, 0].mul_(2.0), x + 1)[-1], x=X)
either("input returned and written", lambda self, x: (x.mul_(2.0), x), x=X)
right("attribute data", lambda self, x: (y := x * 1.0, y.data.add_(1.0), y * 2)[-1], x=X)
right("detached write", lambda self, x: (y := x * 1.0, y.detach().add_(1.0), y * 2)[-1], x=X)
right(
    "copy from another dtype",
    lambda self, x: torch.zeros(2, 5, 8, dtype=torch.int64).copy_(x * 3),
    x=X,
)
right(
    "integer write truncates",
    lambda self, x, i: (y := i.clone(), y[:, 0].copy_(x[:, 0] * 2.7), y)[-1],
    x=normal(2, 5),
    i=whole(2, 5),
)
