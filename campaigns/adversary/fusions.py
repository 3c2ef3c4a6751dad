"""What looks like a norm, an attention or a GELU, and is not quite one."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, marks, normal

CASES = Group("fusions", "patterns that must not be fused, or must stay right")
right, either = CASES.right, CASES.either
X, PIXELS = normal(2, 5, 8), normal(2, 4, 6, 6)
Q = normal(2, 3, 5, 4)
K, V = normal(2, 3, 5, 4, seed=1), normal(2, 3, 5, 4, seed=2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **rest)


ATTENTIONS = {
    "scale of zero": lambda self, q, k, v: sdpa(q, k, v, scale=0.0),
    "scale below zero": lambda self, q, k, v: sdpa(q, k, v, scale=-0.5),
    "scale of one": lambda self, q, k, v: sdpa(q, k, v, scale=1.0),
    "large scale": lambda self, q, k, v: sdpa(q, k, v, scale=30.0),
    "causal": lambda self, q, k, v: sdpa(q, k, v, is_causal=True),
    "causal, fewer keys": lambda self, q, k, v: sdpa(q, k[:, :, :3], v[:, :, :3], is_causal=True),
    "causal, fewer queries": lambda self, q, k, v: sdpa(q[:, :, :3], k, v, is_causal=True),
    "keys for all heads": lambda self, q, k, v: sdpa(q, k[:, :1], v[:, :1]),
    "keys for the batch": lambda self, q, k, v: sdpa(q, k[:1], v[:1]),
    "queries for the batch": lambda self, q, k, v: sdpa(q[:1], k, v),
    "queries for all heads": lambda self, q, k, v: sdpa(q[:, :1], k, v),
    "values wider": lambda self, q, k, v: sdpa(q, k, torch.cat([v, v], -1)),
    "bias of one dimension": lambda self, q, k, v: (q @ k.mT + k[0, 0, :, 0]).softmax(-1) @ v,
    "bias of two dimensions": lambda self, q, k, v: sdpa(q, k, v, attn_mask=(q @ k.mT)[0, 0]),
    "bias of the batch": lambda self, q, k, v: sdpa(q, k, v, attn_mask=(q @ k.mT)[:, :1]),
    "bias of heads": lambda self, q, k, v: sdpa(q, k, v, attn_mask=(q @ k.mT)[:1]),
    "boolean of one dimension": lambda self, q, k, v: (
        (q @ k.mT).masked_fill(k[0, 0, :, 0] > 0, -1e9).softmax(-1) @ v
    ),
    "three dimensions": lambda self, q, k, v: sdpa(q[:, 0], k[:, 0], v[:, 0]),
    "two dimensions": lambda self, q, k, v: sdpa(q[0, 0], k[0, 0], v[0, 0]),
    "five dimensions": lambda self, q, k, v: sdpa(q[None], k[None], v[None]),
    "grouped": lambda self, q, k, v: sdpa(torch.cat([q, q], 1), k, v, enable_gqa=True),
    "same for all three": lambda self, q, k, v: sdpa(q, q, q) + k + v,
    "values are keys": lambda self, q, k, v: sdpa(q, k, k) + v,
    "softmax over queries": lambda self, q, k, v: (q @ k.mT).softmax(-2) @ v,
    "softmax over heads": lambda self, q, k, v: (q @ k.mT).softmax(1) @ v,
    "keys not transposed": lambda self, q, k, v: (q @ k[:, :, :4]).softmax(-1) @ v[:, :, :4],
    "sigmoid weights": lambda self, q, k, v: (q @ k.mT).sigmoid() @ v,
    "relu weights": lambda self, q, k, v: (q @ k.mT).relu() @ v,
    "weights squared": lambda self, q, k, v: (q @ k.mT).softmax(-1).square() @ v,
    "weights returned": lambda self, q, k, v: (w := (q @ k.mT / 2).softmax(-1), w @ v),
    "scores returned": lambda self, q, k, v: (s := q @ k.mT / 2, s.softmax(-1) @ v),
    "weights scaled": lambda self, q, k, v: (q @ k.mT).softmax(-1) * 0.5 @ v,
    "scores capped": lambda self, q, k, v: (torch.tanh(q @ k.mT / 5) * 5).softmax(-1) @ v,
    "one more in the sum": lambda self, q, k, v: (
        e := (q @ k.mT).exp(),
        e / (1 + e.sum(-1, keepdim=True)) @ v,
    )[1],
    "sink": lambda self, q, k, v: F.pad(q @ k.mT, (1, 0)).softmax(-1)[..., 1:] @ v,
    "temperature by head": lambda self, q, k, v: (
        (q @ k.mT * torch.tensor([1.0, 2, 3])[:, None, None]).softmax(-1) @ v
    ),
    "scale given by the input": lambda self, q, k, v: (q @ k.mT * q.mean()).softmax(-1) @ v,
    "scale on both": lambda self, q, k, v: ((q * 0.5) @ (k * 0.3).mT).softmax(-1) @ v,
    "divided by the scale": lambda self, q, k, v: (q / 0.01 @ k.mT).softmax(-1) @ v,
    "cosine": lambda self, q, k, v: (
        (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1) @ v
    ),
    "negative scores": lambda self, q, k, v: (-(q @ k.mT)).softmax(-1) @ v,
    "distances": lambda self, q, k, v: (-torch.cdist(q, k)).softmax(-1) @ v,
    "multiplied mask": lambda self, q, k, v: (q @ k.mT * torch.ones(5, 5).tril()).softmax(-1) @ v,
    "diagonal masked": lambda self, q, k, v: (
        (q @ k.mT).masked_fill(torch.eye(5) > 0, -1e9).softmax(-1) @ v
    ),
    "reversed causal": lambda self, q, k, v: (
        (q @ k.mT).masked_fill(torch.ones(5, 5).tril(-1) > 0, -1e9).softmax(-1) @ v
    ),
    "strictly causal": lambda self, q, k, v: (
        (q @ k.mT).masked_fill(torch.ones(5, 5).triu() > 0, -1e4).softmax(-1) @ v
    ),
    "mask written in the wrong order": lambda self, q, k, v: (
        (q @ k.mT + 1).masked_fill(q.mean((0, 1, 3)) > 0, -1e9).softmax(-1) @ v
    ),
    "log softmax": lambda self, q, k, v: (q @ k.mT).log_softmax(-1) @ v,
    "twice": lambda self, q, k, v: sdpa(sdpa(q, k, v), k, v),
    "values masked": lambda self, q, k, v: (q @ k.mT).softmax(-1) @ (v * (v > 0)),
    "top of the scores": lambda self, q, k, v: (
        s := q @ k.mT,
        s.masked_fill(s < s.topk(2, -1).values[..., -1:], float("-inf")).softmax(-1) @ v,
    )[1],
    "added after the softmax": lambda self, q, k, v: ((q @ k.mT).softmax(-1) + 0.1) @ v,
    "dropout in eval": lambda self, q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.3, False) @ v,
    "talking heads": lambda self, q, k, v: (
        torch.einsum("hg,bgij->bhij", torch.eye(3) + 0.1, q @ k.mT).softmax(-1) @ v
    ),
    "relative": lambda self, q, k, v: (
        (q @ k.mT + (torch.arange(5)[:, None] - torch.arange(5)) * 0.1).softmax(-1) @ v
    ),
    "integer bias": lambda self, q, k, v: (
        (q @ k.mT + (torch.arange(5)[:, None] - torch.arange(5))).softmax(-1) @ v
    ),
    "quick softmax": lambda self, q, k, v: (
        e := (q @ k.mT).exp2(),
        e / e.sum(-1, keepdim=True) @ v,
    )[1],
    "fused with conv": lambda self, q, k, v: F.conv2d(sdpa(q, k, v), torch.ones(3, 3, 1, 1)),
}
for name, attention in ATTENTIONS.items():
    right(
        f"attention, {name}",
        attention,
        q=Q,
        k=K,
        v=V,
    )

NORMS = {
    "mean of absolutes": lambda self, x: x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6),
    "sum for mean": lambda self, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
    "over two dimensions": lambda self, x: (
        x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-6)
    ),
    "over the first": lambda self, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    "cubed": lambda self, x: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6),
    "another's statistic": lambda self, x: (
        x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    ),
    "eps outside": lambda self, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 0.1),
    "eps varies": lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x.abs().amax()),
    "negative eps": lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e-3),
    "no eps": lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "large eps": lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e3),
    "one plus weight": lambda self, x: F.rms_norm(x, (8,)) * (1 + torch.arange(8.0)),
    "weight by row": lambda self, x: F.rms_norm(x, (8,)) * torch.arange(5.0)[:, None],
    "weight before": lambda self, x: (
        (x * torch.arange(8.0)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    ),
    "reciprocal of rsqrt": lambda self, x: x / torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "centered statistic alone": lambda self, x: x * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6),
    "unbiased variance": lambda self, x: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()
    ),
    "deviation plus eps": lambda self, x: (
        (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
    ),
    "median for mean": lambda self, x: (
        y := x - x.median(-1, keepdim=True).values,
        y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5),
    )[1],
    "product with itself": lambda self, x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "product with another": lambda self, x: (
        x * torch.rsqrt((x * x.flip(-1)).mean(-1, keepdim=True).abs() + 1e-6)
    ),
    "statistic returned": lambda self, x: (
        s := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        x * s,
    ),
    "without keepdim": lambda self, x: x[:, :, 0] * torch.rsqrt(x.pow(2).mean(-1) + 1e-6),
    "a slice": lambda self, x: x[..., :4] * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "layer norm of two": lambda self, x: F.layer_norm(x, (5, 8)),
    "layer norm with a large eps": lambda self, x: F.layer_norm(x, (8,), eps=10.0),
    "layer norm without bias": lambda self, x: F.layer_norm(x, (8,), torch.arange(8.0)),
    "twice": lambda self, x: F.layer_norm(F.layer_norm(x, (8,)), (8,)),
    "batch statistics": lambda self, x: (
        (x - x.mean((0, 1))) / (x.var((0, 1), unbiased=False) + 1e-5).sqrt()
    ),
    "l2": lambda self, x: F.normalize(x, dim=-1) * 8**0.5,
    "skip with a factor": lambda self, x: (
        F.layer_norm(x + 0.5 * x.sin(), (8,)) + (x + 0.5 * x.sin())
    ),
    "skip that broadcasts": lambda self, x: F.layer_norm(x + x[:, :1].cos(), (8,)),
    "skip from a row": lambda self, x: F.layer_norm(x + torch.arange(8.0), (8,)),
    "skip used twice": lambda self, x: (s := x + x.sin(), F.layer_norm(s, (8,)) * s, s)[1:],
    "skip of a skip": lambda self, x: (
        s := x + x.sin(),
        t := s + F.rms_norm(s, (8,)),
        F.rms_norm(t, (8,)) + t,
    )[-1],
    "power of 2.0001": lambda self, x: (
        x * torch.rsqrt(x.abs().pow(2.0001).mean(-1, keepdim=True) + 1e-6)
    ),
    "size in the eps": lambda self, x: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1 / x.shape[1])
    ),
    "in another dtype": lambda self, x: (
        y := x.double(),
        y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6),
    )[1].float(),
}
for name, norm in NORMS.items():
    right(f"norm, {name}", norm, x=X)
right(
    "norm over a varying size",
    lambda self, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    x=X,
    dynamic=("x:1=1..16",),
)
right(
    "norm over a varying last size",
    lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    x=X,
    dynamic=("x:2=1..16",),
)

GELUS = {
    "root of 2.001": lambda self, x: 0.5 * x * (1 + torch.erf(x / 2.001**0.5)),
    "few digits": lambda self, x: 0.5 * x * (1 + torch.erf(x / 1.41421)),
    "few digits of the reciprocal": lambda self, x: 0.5 * x * (1 + torch.erf(x * 0.70711)),
    "root of 2.0000001": lambda self, x: 0.5 * x * (1 + torch.erf(x / 1.41421366)),
    "half of 0.5001": lambda self, x: 0.5001 * x * (1 + torch.erf(x / 2**0.5)),
    "0.99 for one": lambda self, x: 0.5 * x * (0.99 + torch.erf(x / 2**0.5)),
    "minus erf": lambda self, x: 0.5 * x * (1 - torch.erf(x / 2**0.5)),
    "another's erf": lambda self, x: 0.5 * x * (1 + torch.erf(x.flip(-1) / 2**0.5)),
    "square": lambda self, x: 0.5 * x * x * (1 + torch.erf(x / 2**0.5)),
    "0.0447": lambda self, x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.0447 * x**3))),
    "0.79788": lambda self, x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3))),
    "fourth power": lambda self, x: (
        0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**4)))
    ),
    "quick": lambda self, x: x * torch.sigmoid(1.702 * x),
    "quick by 1.7": lambda self, x: x * torch.sigmoid(1.7 * x),
    "silu of two": lambda self, x: x * torch.sigmoid(x + 1e-3),
    "inner returned": lambda self, x: (e := torch.erf(x / 2**0.5), 0.5 * x * (1 + e)),
    "exact": lambda self, x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gated": lambda self, x: F.gelu(x[..., :4]) * x[..., 4:],
    "gated the wrong way": lambda self, x: x[..., :4] * F.gelu(x[..., 4:], approximate="tanh"),
    "relu for erf": lambda self, x: 0.5 * x * (1 + F.relu(x / 2**0.5)),
    "added bias": lambda self, x: F.gelu(x + torch.arange(8.0)) - torch.arange(8.0),
    "cumulative normal": lambda self, x: x * torch.distributions.Normal(0.0, 1.0).cdf(x),
}
for name, gelu in GELUS.items():
    right(f"gelu, {name}", gelu, x=X)

CONVOLUTIONS = {
    "group norm of a group": lambda self, x: F.group_norm(x, 1),
    "instance norm by groups": lambda self, x: F.group_norm(x, 4),
    "group norm and swish": lambda self, x: F.silu(F.group_norm(x, 2)),
    "group norm of a weight by pixel": lambda self, x: F.group_norm(x, 2) * torch.arange(6.0),
    "circular convolution": lambda self, x: F.conv2d(
        F.pad(x, (1, 1, 1, 1), mode="circular"), torch.ones(2, 4, 3, 3)
    ),
    "convolution with equal pads": lambda self, x: F.conv2d(
        x, torch.ones(2, 4, 4, 4), padding="same"
    ),
    "transposed convolution": lambda self, x: F.conv_transpose2d(
        x, torch.ones(4, 2, 3, 3), stride=2, padding=1, output_padding=1
    ),
    "dilated transposed": lambda self, x: F.conv_transpose2d(
        x, torch.ones(4, 1, 3, 3), dilation=2, groups=2
    ),
    "depthwise": lambda self, x: F.conv2d(
        x, torch.arange(36.0).view(4, 1, 3, 3), groups=4, padding=1
    ),
    "batch norm folded": lambda self, x: F.batch_norm(
        F.conv2d(x, torch.ones(4, 4, 1, 1)), torch.zeros(4), torch.arange(4.0)
    ),
    "weights from the input": lambda self, x: F.conv2d(x, x[:, :, :3, :3]),
    "pads of a value": lambda self, x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-1.0), 3),
}
for name, convolution in CONVOLUTIONS.items():
    right(f"pixels, {name}", convolution, x=PIXELS)


class Latent(nn.Module):
    """Queries of their own, for every batch the same."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 2, 3, 4))

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(self.latents.expand(k.shape[0], -1, -1, -1), k[:, :2], v[:, :2])


class LatentOnce(Latent):
    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(self.latents, k[:, :2], v[:, :2])


class Shared(nn.Module):
    """One weight in two layers, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + F.linear(x, self.first.weight.T)


class MultiHead(nn.Module):
    def __init__(self, **rest: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **rest)

    def forward(self, x: Tensor, m: Tensor) -> Any:
        return self.inner(x, x, x, key_padding_mask=m)


right("latent queries", Latent, k=K, v=V)
either("latent queries that broadcast", LatentOnce, k=K, v=V)
right("shared weights", Shared, x=X)
right("multi-head", MultiHead, x=X, m=torch.zeros(2, 5, dtype=torch.bool))
right("multi-head, masked", MultiHead, x=X, m=marks(2, 5))
right("multi-head with zeros", partial(MultiHead, add_zero_attn=True), x=X, m=marks(2, 5))
right("multi-head with biases", partial(MultiHead, add_bias_kv=True), x=X, m=marks(2, 5))
right("encoder layer", partial(nn.TransformerEncoderLayer, 8, 2, 16, 0.0, batch_first=True), src=X)
right(
    "encoder layer, norm first",
    partial(nn.TransformerEncoderLayer, 8, 2, 16, 0.0, F.gelu, batch_first=True, norm_first=True),
    src=X,
)
either("recurrent", partial(nn.GRU, 8, 4, batch_first=True), input=X)
either(
    "recurrent, both ways",
    partial(nn.LSTM, 8, 4, batch_first=True, bidirectional=True),
    input=X,
    floor=6e-8,  # a rounding of its gates, which lie between 0 and 1
)
