"""Integer inputs, NaN, zeros, empty outputs, outputs that are shared: what must not be turned away."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, normal, whole

CASES = Group("inputs", "integer ranges, NaN, zeros, empty and shared outputs")
right, either = CASES.right, CASES.either
X = normal(3, 8)


class Timed(nn.Module):
    """A diffusion step: any whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None].float() * torch.exp(-torch.arange(4.0))
        emb = torch.cat([angles.sin(), angles.cos()], -1)
        return x + self.inner(emb)


class Embedded(nn.Module):
    def __init__(self, rows: int = 50) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 8)

    def forward(self, i: Tensor) -> Tensor:
        result: Tensor = self.table(i)
        return result


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, i: Tensor, mask: Tensor) -> Tensor:
        x = self.table(i)
        bias = (1.0 - mask[:, None].float()) * -1e4
        result: Tensor = self.out((x @ x.mT + bias).softmax(-1) @ x)
        return result


class Optional(nn.Module):
    """An input that may be left out, one that nothing reads."""

    def forward(self, x: Tensor, y: Tensor | None = None, unused: Tensor | None = None) -> Tensor:
        return x * 2 if y is None else x * 2 + y


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Any:
        y = x.relu()
        return {"a": y, "b": [y, (x, {"c": y * 2})], "none": None}


right("time step", Timed, x=X, t=torch.tensor([500, 500, 500]), is_quick=True)
right("one time step", Timed, x=X[:1], t=torch.tensor([500]))
right("embedding of few ids", Embedded, i=torch.tensor([[7, 7, 7]]))
right("mask of ones", Attended, i=whole(2, 5, high=50), mask=torch.ones(2, 5, dtype=torch.long))
right("id of zero", Embedded, i=torch.zeros(2, 3, dtype=torch.long))
right("constant integers", lambda self, i: i * 2 - 1, i=torch.full((2, 3), 4))
right("scalar integer", lambda self, x, n: x * n, x=X, n=torch.tensor(3))
right("scalar float", lambda self, x, s: x * s, x=X, s=torch.tensor(0.5))
right("one of one", lambda self, x: x * 2, x=normal(1))
right("0-d alone", lambda self, x: x.sin() + 1, x=torch.tensor(0.3))
right("index into a weight", lambda self, i: torch.arange(20.0)[i], i=torch.tensor([3, 3]))
right("optional inputs", Optional, x=X, y=normal(3, 8, seed=1))
right("optional left out", Optional, x=X)
either("unused input", lambda self, x, y: x * 2, x=X, y=normal(3, 8))
right("comparison never true", lambda self, x: x > 1000.0, x=X)
right("comparison always true", lambda self, x: x < 1e9, x=X)
either("comparison that cannot be", lambda self, x: x.abs() < 0, x=X)
either("zeros alone", lambda self, x: torch.zeros_like(x), x=X)
either("ones alone", lambda self, x: torch.ones_like(x), x=X)
either("constant alone", lambda self, x: torch.arange(3.0), x=X)
right("not a number anywhere negative", lambda self, x: torch.log(x), x=X, is_quick=True)
right("root of negatives", lambda self, x: torch.sqrt(x), x=X)
right("zero by zero", lambda self, x: (x - x) / (x - x), x=X)
right("one by zero", lambda self, x: 1 / (x - x), x=X)
right("asin beyond one", lambda self, x: torch.asin(x * 3), x=X)
right("negative to a fraction", lambda self, x: x**0.5, x=X)
right("log of zero", lambda self, x: torch.log(x.relu()), x=X)
right("nan replaced", lambda self, x: torch.nan_to_num(torch.log(x), nan=-1.0), x=X)
right("nan compared", lambda self, x: (torch.log(x) > 0, torch.log(x) != torch.log(x)), x=X)
right("nan through max", lambda self, x: torch.log(x).amax(-1), x=X)
right("nan through clamp", lambda self, x: torch.log(x).clamp(-1, 1), x=X)
right("nan through where", lambda self, x: torch.where(x > 0, torch.log(x), 0.0), x=X)
right("nan through sum", lambda self, x: torch.log(x).nansum(-1), x=X)
right("nan through relu", lambda self, x: torch.log(x).relu(), x=X)
right("nan through sort", lambda self, x: torch.log(x).sort(-1).values, x=X)
right("nan through argmax", lambda self, x: torch.log(x).argmax(-1), x=X)
right("infinite through softmax", lambda self, x: (x / 0).softmax(-1), x=X)
right("empty slice", lambda self, x: x[:, 8:], x=X)
right("empty input dimension", lambda self, x: x.sum(1), x=normal(3, 0))
right("sum of empty", lambda self, x: x[:, :0].sum(-1) + x[:, 0], x=X)
right("product of empty", lambda self, x: x[:, :0].prod(-1), x=X)
either("mean of empty", lambda self, x: x[:, :0].mean(-1), x=X)
right("concatenated with empty", lambda self, x: torch.cat([x[:, :0], x, x[:, 8:]], -1), x=X)
right("empty of nonzero", lambda self, x: torch.nonzero(x > 100), x=X)
right("linear of chosen rows", lambda self, x: F.linear(x[x[:, 0] > 0], x[:2]), x=X)
right("matrix with empty middle", lambda self, x: x[:, :0] @ x.mT[:0], x=X)
for name, reduce in {
    "mean": lambda x: x[x > 1].mean(),
    "any": lambda x: (x[x > 1] > 3).any(),
    "variance": lambda x: x[x > 1].var(unbiased=False),
    "deviation": lambda x: x[x > 1].std(),
    "norm": lambda x: x[x > 1].norm(),
}.items():
    for precision in ("fp32", "fp16"):
        either(
            f"{name} of what is chosen in {precision}",
            lambda self, x, do=reduce: do(x),
            x=X,
            precision=precision,
        )
right("empty boolean all", lambda self, x: (x[:, :0] > 0).all(-1), x=X)
right("same twice", lambda self, x: (y := x * 2, y, y)[1:], x=X)
right("same value two ways", lambda self, x: (x * 2, x + x), x=X)
right("input returned", lambda self, x: (x, x * 2), x=X, is_quick=True)
either("input alone returned", lambda self, x: x, x=X)
right("view and its base", lambda self, x: (y := x * 2, y.view(-1), y.mT), x=X)
right("weight returned", lambda self, x: (x * 2, torch.ones(3)), x=X)
right("nested outputs", Nested, x=X)
right("a list of chunks", lambda self, x: list(x.chunk(4, -1)), x=X)
right("a named tuple", lambda self, x: torch.max(x, -1), x=X)
right("a number beside", lambda self, x: (x * 2, 3), x=X)
right("a float beside", lambda self, x: (x * 2, 0.5), x=X)
right("none beside", lambda self, x: (x * 2, None), x=X)
right("many outputs", lambda self, x: tuple(x * n for n in range(1, 20)), x=X)
right("0-d outputs", lambda self, x: (x.sum(), x.mean(), x.max()), x=X)
right("0-d index", lambda self, x, i: x[i], x=X, i=torch.tensor(1))
right("0-d index of a column", lambda self, x, i: x[:, i], x=X, i=torch.tensor(1))
right("0-d boolean", lambda self, x, b: torch.where(b, x, -x), x=X, b=torch.tensor(True))
right("negative ids", lambda self, x, i: x[:, i], x=X, i=torch.tensor([-1, -8, 3]))
right("wrapped index", lambda self, x, i: x[:, i % 8], x=X, i=whole(4, high=100))
right(
    "clamped index",
    lambda self, i: F.embedding(i.clamp(0, 9), torch.arange(20.0).view(10, 2)),
    i=whole(2, 3),
)
right("id of a range", lambda self, i: F.one_hot(i % 7, 7), i=whole(2, 3))
right(
    "mask of integers", lambda self, x, m: x * (m != 0), x=X, m=torch.ones(3, 8, dtype=torch.long)
)
right(
    "mask of floats",
    lambda self, x, m: x.masked_fill(m == 0, -1e4).softmax(-1),
    x=X,
    m=torch.ones(3, 8),
)
right(
    "lengths",
    lambda self, x, n: x * (torch.arange(8)[None] < n[:, None]),
    x=X,
    n=torch.tensor([8, 8, 8]),
)
right("dates", lambda self, n: (n // 86400) % 7, n=torch.tensor([1_700_000_000, 1_600_000_000]))
right("large ids", lambda self, n: n % 1009, n=torch.tensor([2**40, 2**50]))
right("without batch", lambda self, x: x[0] + x[1], x=normal(2))
either("tiny everywhere", lambda self, x: x * 1e-30, x=X)
either("batch in one input alone", lambda self, x, y: x + y, x=X, y=normal(1, 8))
either(
    "shared leading size by chance",
    lambda self, x, y: x @ y,
    x=normal(3, 3),
    y=normal(3, 3, seed=3),
)
either(
    "weights as inputs", lambda self, x, w: F.linear(x, w), x=normal(4, 8), w=normal(4, 8, seed=1)
)
either(
    "positions without batch",
    lambda self, x, p: x + p.sum(-1)[:, None],
    x=normal(2, 6, 8),
    p=normal(6, 2),
)
either(
    "images of positions",
    lambda self, x, p: x + F.pad(p, (0, 5)),
    x=normal(2, 6, 8),
    p=normal(6, 3),
)
either("coupled by matmul", lambda self, x, y: x @ y.mT, x=normal(4, 6), y=normal(4, 6, seed=1))
