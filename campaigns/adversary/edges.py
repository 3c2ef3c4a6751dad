"""Values at which an operator's lowering loses digits, overflows, or takes the other branch."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, marks, normal, uniform, whole

CASES = Group("edges", "values: zero, tiny, large, whole, infinite, masked")
right = CASES.right
X, Y = normal(3, 8), normal(3, 8, seed=5)

ONE = {
    "logsigmoid": F.logsigmoid,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "mish": F.mish,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sinh": torch.sinh,
    "asinh": torch.asinh,
    "atanh": torch.atanh,
    "acosh": torch.acosh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "sigmoid": torch.sigmoid,
    "logit": torch.logit,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "relu6": F.relu6,
    "round": torch.round,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "frac": torch.frac,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "signbit": torch.signbit,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "sinc": torch.sinc,
    "square": torch.square,
    "tan": torch.tan,
    "asin": torch.asin,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "nan_to_num": torch.nan_to_num,
    "rad2deg": torch.rad2deg,
    "erfinv": torch.erfinv,
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "i0": torch.i0,
}
FLOORS = {"tanhshrink": 2e-11}
"""A rounding of an input of 1e-4, where `x - tanh(x)` is less than one."""
UNSURE = ("erfinv", "lgamma", "digamma", "i0", "isinf", "erfc", "signbit")
for name, operator in ONE.items():
    to = CASES.either if name in UNSURE else right
    to(
        name,
        lambda self, x, operator=operator: operator(x),
        x=X,
        floor=FLOORS.get(name, 0.0),
    )

TWO = {
    "atan2": torch.atan2,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "floor divide": torch.floor_divide,
    "logaddexp": torch.logaddexp,
    "hypot": torch.hypot,
    "maximum": torch.maximum,
    "fmin": torch.fmin,
    "power": lambda x, y: x.abs() ** y,
    "power of negatives": torch.pow,
    "copysign": torch.copysign,
    "xlogy": torch.xlogy,
    "heaviside": torch.heaviside,
    "true divide": torch.true_divide,
    "cross entropy of logits": lambda x, y: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), reduction="none"
    ),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.3),
    "distance": lambda x, y: torch.cdist(x, y),
    "isclose": torch.isclose,
    "kl divergence": lambda x, y: F.kl_div(
        x.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction="none"
    ),
}
for name, pair in TWO.items():
    to = CASES.either if name in ("fmin", "copysign", "heaviside") else right
    to(name, lambda self, x, y, pair=pair: pair(x, y), x=X, y=Y)

right("floor by a tenth", lambda self, x: x // 0.1, x=X)
right("remainder of a tenth", lambda self, x: x % 0.1, x=X)
right("remainder of a negative", lambda self, x: x % -0.75, x=X)
right("remainder of a number by it", lambda self, x: 5.0 % (x.abs() + 0.5), x=X)
right("divide, rounding down", lambda self, x: torch.div(x, 0.3, rounding_mode="floor"), x=X)
right("divide, rounding to zero", lambda self, x: torch.div(x, 0.3, rounding_mode="trunc"), x=X)
right("round to decimals", lambda self, x: torch.round(x, decimals=2), x=X)
right("round to negative decimals", lambda self, x: torch.round(x, decimals=-1), x=X)
right("softmax", lambda self, x: x.softmax(-1), x=X)
right("log softmax", lambda self, x: x.log_softmax(-1), x=X)
right("softmin", lambda self, x: F.softmin(x, -1), x=X)
right("log of softmax", lambda self, x: (x.softmax(-1) + 1e-30).log(), x=X)
right("logsumexp", lambda self, x: x.logsumexp(-1), x=X)
CASES.either("logcumsumexp", lambda self, x: x.logcumsumexp(-1), x=X)
right("logsumexp of two", lambda self, x: x.logsumexp((0, 1)), x=X)
right(
    "cross entropy",
    lambda self, x, t: F.cross_entropy(x, t, reduction="none"),
    x=X,
    t=whole(3, high=8),
)
CASES.either(
    "cross entropy, smoothed",
    lambda self, x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    x=X,
    t=whole(3, high=8),
)
right(
    "binary cross entropy",
    lambda self, x, t: F.binary_cross_entropy(x.sigmoid(), t.float(), reduction="none"),
    x=X,
    t=marks(3, 8),
)
right("variance", lambda self, x: x.var(-1), x=X)
right("variance of one", lambda self, x: x[:, :1].var(-1), x=X)
right("variance, uncorrected", lambda self, x: x.var(-1, unbiased=False), x=X)
right("deviation and mean", lambda self, x: torch.std_mean(x, -1), x=X)
right("norm 1", lambda self, x: x.norm(p=1, dim=-1), x=X)
right("norm 3", lambda self, x: x.norm(p=3, dim=-1), x=X)
right("norm infinity", lambda self, x: x.norm(p=float("inf"), dim=-1), x=X)
right("norm 0", lambda self, x: x.norm(p=0, dim=-1), x=X)
right("norm 0.5", lambda self, x: x.norm(p=0.5, dim=-1), x=X)
right("sum of squares' root", lambda self, x: x.square().sum(-1).sqrt(), x=X)
right("cumulative sum", lambda self, x: x.cumsum(-1), x=X)
right("cumulative product", lambda self, x: x.cumprod(-1), x=X)
CASES.either("cumulative maximum", lambda self, x: x.cummax(-1), x=X)
right("product", lambda self, x: x.prod(-1), x=X)
right("median", lambda self, x: x.median(-1).values, x=X)
right("argmax of ties", lambda self, x: x.round().argmax(-1), x=X)
right("argmin of ties", lambda self, x: x.round().argmin(-1), x=X)
right("maximum with indices", lambda self, x: x.round().max(-1), x=X)
right("top k values", lambda self, x: x.topk(3).values, x=X)
right("sort values", lambda self, x: x.sort(-1, descending=True).values, x=X)
right("stable sort", lambda self, x: torch.sort(x.round(), dim=-1, stable=True), x=X)
right(
    "argsort, stable, descending",
    lambda self, x: torch.sort(x.round(), dim=-1, descending=True, stable=True)[1],
    x=X,
)
CASES.either("kth value", lambda self, x: x.kthvalue(2, -1).values, x=X)
right(
    "searchsorted", lambda self, x: torch.searchsorted(torch.tensor([-1.0, 0.0, 0.0, 1.0]), x), x=X
)
right(
    "searchsorted, right",
    lambda self, x: torch.searchsorted(torch.tensor([-1.0, 0.0, 0.0, 1.0]), x, right=True),
    x=X,
)
right("bucketize", lambda self, x: torch.bucketize(x, torch.tensor([-0.5, 0.0, 2.0])), x=X)
right("one hot of clamped", lambda self, i: F.one_hot(i.clamp(0, 5), 6), i=whole(3, 4))
right("clamp with crossed bounds", lambda self, x: x.clamp(0.5, -0.5), x=X)
right("clamp by tensors", lambda self, x, y: x.clamp(-y.abs(), y.abs()), x=X, y=Y)
right("cast to int64", lambda self, x: x.to(torch.int64), x=X)
right("cast to int32 and half", lambda self, x: (x * 0.5).int() * 0.5, x=X)
right("cast to bool", lambda self, x: x.bool(), x=X)
right("cast to half and back", lambda self, x: x.half().float(), x=X)
right("int64 power", lambda self, i: i**3, i=whole(3, 4, high=2000000))
right("two to the int64", lambda self, i: 2 ** i.clamp(0, 62), i=whole(3, 4))
right("int64 division down", lambda self, i: i // 7, i=whole(3, 4, low=-9))
right("int64 remainder", lambda self, i: i % -7, i=whole(3, 4, low=-9))
right("int64 fmod", lambda self, i: torch.fmod(i, 5), i=whole(3, 4, low=-9))
right(
    "int64 to zero", lambda self, i: torch.div(i, 4, rounding_mode="trunc"), i=whole(3, 4, low=-9)
)
right("large int64", lambda self, i: i * 3000000019 + 1, i=whole(3, 4))
right("int64 shifts", lambda self, i: ((i << 3) >> 1) ^ 5, i=whole(3, 4))
right("int64 bits", lambda self, i: (i & 6) | (~i & 1), i=whole(3, 4))
right("int64 through a mean", lambda self, i: i.float().mean(-1) + i.sum(-1), i=whole(3, 4))
right("int64 absolute and sign", lambda self, i: i.abs() * i.sign(), i=whole(3, 4, low=-9))
right("int32 overflow", lambda self, i: i.int() * 65536 * 65536, i=whole(3, 4))
right("true division of integers", lambda self, i: i / 3, i=whole(3, 4, low=-9))
right("integer and float", lambda self, i, x: i * x + i, i=whole(3, 8), x=X)
CASES.either(
    "nearest, reflection",
    lambda self, x, g: F.grid_sample(
        x, g, mode="nearest", padding_mode="reflection", align_corners=False
    ),
    x=normal(2, 3, 6, 6),
    g=normal(2, 4, 4, 2),
)
right(
    "bilinear, border",
    lambda self, x, g: F.grid_sample(x, g, padding_mode="border", align_corners=False),
    x=normal(2, 3, 6, 6),
    g=normal(2, 4, 4, 2),
)
right(
    "bilinear, aligned",
    lambda self, x, g: F.grid_sample(x, g, align_corners=True),
    x=normal(2, 3, 6, 6),
    g=normal(2, 4, 4, 2),
)
right(
    "bicubic grid",
    lambda self, x, g: F.grid_sample(x, g, mode="bicubic", align_corners=False),
    x=normal(2, 3, 6, 6),
    g=normal(2, 4, 4, 2),
)
right(
    "average pool, counted pads",
    lambda self, x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    x=normal(2, 3, 7, 7),
)
right(
    "average pool, ceil",
    lambda self, x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    x=normal(2, 3, 8, 8),
)
right(
    "max pool with indices",
    lambda self, x: F.max_pool2d(x, 2, return_indices=True),
    x=normal(2, 3, 6, 6),
)
right(
    "max pool of negatives, padded",
    lambda self, x: F.max_pool2d(-x.abs() - 1, 3, 2, 1),
    x=normal(2, 3, 7, 7),
)
right("adaptive pool", lambda self, x: F.adaptive_avg_pool2d(x, (3, 2)), x=normal(2, 3, 7, 5))
right(
    "interpolate nearest", lambda self, x: F.interpolate(x, scale_factor=1.5), x=normal(2, 3, 5, 5)
)
right(
    "interpolate bicubic",
    lambda self, x: F.interpolate(x, size=(7, 9), mode="bicubic", align_corners=False),
    x=normal(2, 3, 5, 5),
)
right(
    "interpolate bilinear, antialias",
    lambda self, x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True),
    x=normal(2, 3, 7, 7),
)
right(
    "interpolate area",
    lambda self, x: F.interpolate(x, size=(2, 3), mode="area"),
    x=normal(2, 3, 7, 7),
)
right("reflected pads", lambda self, x: F.pad(x, (2, 3), mode="reflect"), x=X)
right("circular pads", lambda self, x: F.pad(x[None], (2, 3), mode="circular"), x=X)
right("negative pads", lambda self, x: F.pad(x, (-2, 1), value=3.0), x=X)


class Added(nn.Module):
    """A comparison that is added to scores: a one, not a mask."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return ((q @ k.mT) / 2 + (k < 0.5).any(-1, keepdim=True).mT).softmax(-1) @ k


class Masked(nn.Module):
    """Keys that are masked by `value`, in some rows all."""

    def __init__(
        self, value: float = float("-inf"), sdpa: bool = False, is_bool: bool = True
    ) -> None:
        super().__init__()
        self.value, self.sdpa, self.is_bool = value, sdpa, is_bool

    def forward(self, q: Tensor, m: Tensor) -> Tensor:
        k, v = q * 0.5 + 1, q - 1
        mask = (
            m[:, None, None, :]
            if self.is_bool
            else torch.where(m, 0.0, self.value)[:, None, None, :]
        )
        if self.sdpa:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = q @ k.mT * 0.5
        scores = scores.masked_fill(~mask, self.value) if self.is_bool else scores + mask
        return scores.softmax(-1) @ v


Q, M = normal(2, 2, 5, 4), marks(2, 5)
right("added comparison", Added, q=normal(2, 5, 4), k=normal(2, 5, 4, seed=3))
for value in (float("-inf"), -1e4, torch.finfo(torch.float32).min, -1e9, -100.0, -5.0):
    for is_bool in (True, False):
        right(
            f"masked by {value:g}{'' if is_bool else ', added'}",
            partial(Masked, value, False, is_bool),
            q=Q,
            m=M,
        )
for value in (float("-inf"), -1e4, torch.finfo(torch.float32).min, -3.0):
    right(f"mask of {value:g} given to sdpa", partial(Masked, value, True, False), q=Q, m=M)
right("boolean mask given to sdpa", partial(Masked, 0.0, True), q=Q, m=M)
right(
    "comparison as a bias", lambda self, q: ((q @ q.mT) + (q[..., :1] < 0.5)).softmax(-1) @ q, q=Q
)
right(
    "softmax masked to zero after",
    lambda self, q, m: (q @ q.mT).softmax(-1).masked_fill(~m[:, None, None], 0.0) @ q,
    q=Q,
    m=M,
)
right(
    "masked softmax renormalized",
    lambda self, x, m: (w := x.exp() * m, w / (w.sum(-1, keepdim=True) + 1e-9))[1],
    x=X,
    m=marks(3, 8),
)
right(
    "masked mean", lambda self, x, m: (x * m).sum(-1) / m.sum(-1).clamp(min=1), x=X, m=marks(3, 8)
)
right(
    "masked maximum",
    lambda self, x, m: x.masked_fill(~m, float("-inf")).amax(-1),
    x=X,
    m=marks(3, 8),
)
right("where of infinities", lambda self, x, m: torch.where(m, x / 0.0, x), x=X, m=marks(3, 8))
right("cumulative mask", lambda self, m: (m.cumsum(-1) - 1).masked_fill(~m, 1), m=marks(3, 8))
right("layer norm of constants", lambda self, x: F.layer_norm(x.round(), (8,)), x=X)
right("instance norm", lambda self, x: F.instance_norm(x), x=normal(2, 3, 4, 4))
right("group norm of constants", lambda self, x: F.group_norm(x, 2), x=normal(2, 4, 3, 3))
right("local response norm", lambda self, x: F.local_response_norm(x, 3), x=normal(2, 4, 3, 3))
right("rms norm", lambda self, x: F.rms_norm(x, (8,), eps=1e-6), x=X)
right("rms norm without eps", lambda self, x: F.rms_norm(x, (8,)), x=X)
right("glu", lambda self, x: F.glu(x, -1), x=X)
right("cosine of large", lambda self, x: torch.cos(x * 100), x=X)
right(
    "einsum with a repeated index",
    lambda self, x: torch.einsum("bii->bi", x[:, None] * x[..., None]),
    x=X,
)
right(
    "embedding with pads",
    lambda self, i: F.embedding(i, torch.arange(40.0).view(10, 4), padding_idx=0),
    i=whole(3, 4, high=10),
)
right("gather", lambda self, x, i: x.gather(1, i), x=X, i=whole(3, 4, high=8))
right("negative indices", lambda self, x, i: x[:, -i], x=X, i=whole(4, low=1, high=8))
right("take along", lambda self, x: torch.take_along_dim(x, x.argsort(-1), -1), x=X)
right("lerp of far", lambda self, x, y: torch.lerp(x, y, 0.7), x=X, y=Y)
right("quantile", lambda self, x: torch.quantile(x, 0.3, dim=-1), x=X)
right("triangle", lambda self, x: torch.tril(x, -1) + torch.triu(x, 2), x=X)
right(
    "histogram by comparing", lambda self, x: (x[..., None] >= torch.linspace(-1, 1, 5)).sum(1), x=X
)
CASES.either("uniform draws kept", lambda self, x: x + uniform(8, seed=3), x=X)
