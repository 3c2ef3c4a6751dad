"""Code that depends on sizes: branches, lookups, text, floats, products."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, normal, whole

CASES = Group("sizes", "code that depends on sizes")
right, either = CASES.right, CASES.either
X = normal(3, 4, 8)
B, S = "x:0=1..16", "x:1=1..16"
SIZES = {3: 1.5, 4: 2.0, 5: 2.5}


class Branch(nn.Module):
    """Another factor where a predicate of the sizes holds."""

    def __init__(self, predicate: Any) -> None:
        super().__init__()
        self.predicate = predicate

    def forward(self, x: Tensor) -> Tensor:
        if self.predicate(x):
            return x * 3
        return x * 2


PREDICATES = {
    "batch is one": lambda x: x.shape[0] == 1,
    "length is one": lambda x: x.shape[1] == 1,
    "length is seven": lambda x: x.shape[1] == 7,
    "batch is even": lambda x: x.shape[0] % 2 == 0,
    "length is above ten": lambda x: x.shape[1] > 10,
    "product is 1369": lambda x: x.shape[0] * x.shape[1] == 1369,
    "product is 35": lambda x: x.shape[0] * x.shape[1] == 35,
    "sum is 13": lambda x: x.shape[0] + x.shape[1] == 13,
    "equal sizes": lambda x: x.shape[0] == x.shape[1],
    "many elements": lambda x: x.numel() > 1000,
    "square is 49": lambda x: x.shape[1] ** 2 == 49,
    "text of size": lambda x: str(x.shape[1]) == "9",
    "size is int": lambda x: isinstance(x.shape[0], int),
    "type is int": lambda x: type(x.shape[0]) is int,
    "in a set": lambda x: x.shape[1] in {2, 9},
    "in a range": lambda x: x.shape[1] in range(3, 12, 4),
    "text of shape": lambda x: "5" in repr(tuple(x.shape)),
    "bits of size": lambda x: x.shape[1] & 7 == 0,
    "half is even": lambda x: (x.shape[1] // 2) % 2 == 0,
    "root": lambda x: int(x.shape[1] ** 0.5) ** 2 == x.shape[1],
    "hash of size": lambda x: hash(x.shape[1]) == 11,
    "bit length": lambda x: int(x.shape[1]).bit_length() > 3,
    "len": lambda x: len(x) == 5,
    "stride": lambda x: x.stride(0) == 40,
    "is contiguous": lambda x: x.transpose(0, 1).is_contiguous(),
    "size bytes": lambda x: x.nbytes == 32 * 25,
    "max of sizes": lambda x: max(x.shape[:2]) == 12,
    "tuple of sizes": lambda x: tuple(x.shape) == (2, 6, 8),
    "sorted sizes": lambda x: sorted(x.shape) == [5, 7, 8],
    "format": lambda x: f"{x.shape[0]}x{x.shape[1]}" == "2x2",
    "divides": lambda x: 60 % x.shape[1] == 0,
    "last and first": lambda x: x.shape[1] >= 2 and x.shape[0] <= 2,
}
for name, predicate in PREDICATES.items():
    quick = name in ("batch is one", "product is 1369", "type is int")
    either(name, partial(Branch, predicate), x=X, dynamic=(B, S), is_quick=quick)
    if name in ("batch is one", "length is seven", "text of size", "size is int", "equal sizes"):
        either(f"{name} by default", partial(Branch, predicate), x=X)


class Large(nn.Module):
    """A guard that only one pair of 16,384 breaks."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        return x - 1 if h * w == 1369 else x + 1


class Cached(nn.Module):
    """A table of positions is made again where the length grows."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.table.shape[0]:
            self.table = torch.arange(float(x.shape[1])) * 2
        return x + self.table[: x.shape[1], None]


class Lookup(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * SIZES.get(x.shape[1], 1.0)


class Interpolated(nn.Module):
    """Positions are resized unless the picture has the trained size."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 8, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] == self.positions.shape[-2:]:
            return x + self.positions
        return x + F.interpolate(self.positions, x.shape[-2:], mode="bilinear")


class Windows(nn.Module):
    """Padded to whole windows of four, and cut again."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        padded = F.pad(x, (0, 0, 0, -length % 4))
        windows = padded.reshape(x.shape[0], -1, 4, 8)
        return (windows - windows.mean(2, keepdim=True)).flatten(1, 2)[:, :length]


class Shifted(nn.Module):
    """Swin's shift is taken only where there is more than one window."""

    def forward(self, x: Tensor) -> Tensor:
        shift = 0 if x.shape[1] <= 4 else 2
        if shift > 0:
            x = torch.roll(x, -shift, 1)
        return x.cumsum(1)


either(
    "product is 1369 of pictures", Large, x=normal(1, 2, 6, 8), dynamic=("x:2=1..128", "x:3=1..128")
)
either("cached table", Cached, x=X, dynamic=(S,))
either("lookup", Lookup, x=X, dynamic=(B, S), is_quick=True)
either(
    "interpolated positions", Interpolated, x=normal(2, 8, 6, 6), dynamic=("x:2=1..20", "x:3=1..20")
)
right("windows", Windows, x=X, dynamic=(B, S))
either("shifted windows", Shifted, x=normal(2, 8, 8), dynamic=(B, S))

RIGHT = {
    "first ten": lambda self, x: x[:, :10],
    "last ten": lambda self, x: x[:, -10:],
    "second half": lambda self, x: x[:, x.shape[1] // 2 :],
    "every third": lambda self, x: x[:, ::3],
    "all but the first": lambda self, x: x[:, 1:],
    "all but the last": lambda self, x: x[:, :-1],
    "last": lambda self, x: x[:, -1],
    "mean by size": lambda self, x: x.sum(1) / x.shape[1],
    "positions": lambda self, x: x + torch.arange(x.shape[1])[:, None],
    "times linspace": lambda self, x: x * torch.linspace(-1, 1, x.shape[1])[:, None],
    "linspace": lambda self, x: x + torch.linspace(-1, 1, x.shape[1])[:, None],
    "causal": lambda self, x: (
        (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e9).softmax(-1) @ x
    ),
    "distances": lambda self, x: (
        (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None]).abs() + x.sum()
    ),
    "flatten": lambda self, x: x.flatten(0, 1),
    "flatten and back": lambda self, x: x.flatten(0, 1).relu().view(x.shape[0], x.shape[1], -1),
    "outer": lambda self, x: x[:, :, None] * x[:, None],
    "repeat by size": lambda self, x: x[:, :1].repeat(1, x.shape[1], 1),
    "expand by size": lambda self, x: x[:, :1].expand(-1, x.shape[1], -1) + x,
    "concatenated with itself": lambda self, x: torch.cat([x, x[:, :1]], 1),
    "pad by size": lambda self, x: F.pad(x, (0, 0, x.shape[1], 1)),
    "root of the size": lambda self, x: x / x.shape[1] ** 0.5,
    "tensor of sizes": lambda self, x: torch.tensor([x.shape[0], x.shape[1]]) + x.sum().long() * 0,
    "size as an output": lambda self, x: (x * 2, x.shape[1]),
    "number of elements": lambda self, x: x / x.numel(),
    "roll by one": lambda self, x: x.roll(1, 1),
    "flip": lambda self, x: x.flip(1),
    "unfold": lambda self, x: F.pad(x, (0, 0, 2, 2)).unfold(1, 3, 1).sum(-1),
    "minimum of sizes": lambda self, x: x[:, : min(x.shape[1], 4)],
    "half up": lambda self, x: x[:, : (x.shape[1] + 1) // 2],
    "full by size": lambda self, x: torch.full((x.shape[1],), 2.0) + x.mean(-1),
    "identity matrix": lambda self, x: torch.eye(x.shape[1]) @ x,
    "triangle": lambda self, x: torch.tril(torch.ones(x.shape[1], x.shape[1])) @ x,
    "maximum over length": lambda self, x: x.max(1),
    "softmax over length": lambda self, x: x.softmax(1),
    "normed over length": lambda self, x: (
        (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    ),
    "cumulative over length": lambda self, x: x.cumsum(1),
}
for name, forward in RIGHT.items():
    right(name, forward, x=X, dynamic=(B, S))
EITHER = {
    "chunk in two": lambda self, x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "chunk in three": lambda self, x: x.chunk(3, 1)[0],
    "split in fours": lambda self, x: x.split(4, 1)[0],
    "roll by half": lambda self, x: x.roll(x.shape[1] // 2, 1),
    "steps of 0.7": lambda self, x: torch.arange(0, x.shape[1], 0.7).sum() + x,
    "steps of 0.7 given": lambda self, x: torch.arange(0, x.shape[1], 0.7),
    "scaled by 1.3": lambda self, x: F.interpolate(x, scale_factor=1.3),
    "scaled by 0.3 kept": lambda self, x: F.interpolate(
        x.mT, scale_factor=1.7, recompute_scale_factor=True
    ),
    "scaled linearly by 1.1": lambda self, x: F.interpolate(x.mT, scale_factor=1.1, mode="linear"),
    "log of the size": lambda self, x: x * torch.log2(torch.tensor(float(x.shape[1]))),
    "two to the size": lambda self, x: x * 2.0 ** -x.shape[1],
    "rounded size": lambda self, x: x[:, : round(x.shape[1] * 0.5)],
    "rounded up size": lambda self, x: x[:, : -(-x.shape[1] // 3)],
    "ceil of a third": lambda self, x: x[:, : int(torch.ceil(torch.tensor(x.shape[1] / 3)))],
    "shift of size": lambda self, x: x * (1 << x.shape[1]),
    "view in pairs": lambda self, x: x.view(x.shape[0], x.shape[1] // 2, 2, 8).sum(2),
    "view square": lambda self, x: x.view(x.shape[0], 2, -1, 8).sum(1),
    "loop over length": lambda self, x: torch.stack([x[:, t] * t for t in range(x.shape[1])], 1),
    "loop over batch": lambda self, x: torch.stack([row.softmax(0) for row in x]),
    "while it halves": lambda self, x: x[:, :1] * sum(1 for _ in bin(int(x.shape[1]))),
    "second row": lambda self, x: x[1] + x,
    "fourth position": lambda self, x: x[:, 3],
    "squeeze the batch": lambda self, x: x.squeeze(0),
    "squeeze": lambda self, x: x.squeeze(),
    "topk of half": lambda self, x: x.topk(x.shape[1] // 2 + 1, 1).values,
    "pool of length": lambda self, x: F.adaptive_avg_pool1d(x.mT, 3),
    "nested": lambda self, x: x[: x.shape[1]],
    "reflect by two": lambda self, x: F.pad(x.mT, (2, 2), mode="reflect"),
    "variance over length": lambda self, x: x.var(1),
    "median over length": lambda self, x: x.median(1).values,
    "assert of size": lambda self, x: (torch._assert(x.shape[1] < 12, "long"), x * 2)[1],
    "broadcast of one": lambda self, x: x + x[:, : 1 + (x.shape[1] - 1) * 0],
    "einsum": lambda self, x: torch.einsum("bsd,btd->bst", x, x).sum(0, keepdim=x.shape[0] > 0),
    "conv over length": lambda self, x: F.conv1d(x.mT, torch.ones(8, 8, 3), padding=1, stride=2),
    "matmul broadcast": lambda self, x: x.reshape(-1, 8).T @ x.reshape(-1, 8),
}
for name, forward in EITHER.items():
    either(
        name,
        forward,
        x=X,
        dynamic=(B, S),
        is_quick=name == "squeeze the batch",
    )


class Coupled(nn.Module):
    """Two inputs of sizes that only broadcast where one is 1."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y


either(
    "coupled by broadcasting",
    Coupled,
    x=normal(3, 4),
    y=normal(1, 4),
    dynamic=("x:0=1..8", "y:0=1..8"),
)
right("sizes tied by use", Coupled, x=normal(3, 4), y=normal(3, 4, seed=2))
either(
    "concatenated sizes",
    lambda self, x, y: torch.cat([x, y]) if x.shape[0] < y.shape[0] else torch.cat([y, x]),
    x=normal(3, 4),
    y=normal(5, 4),
    dynamic=("x:0=1..8", "y:0=1..8"),
)
either(
    "twice the size",
    lambda self, x, y: y.view(x.shape[0], 2, 4) + x[:, None],
    x=normal(3, 4),
    y=normal(6, 4),
)
either(
    "picture in patches",
    lambda self, x: F.unfold(x, 2, stride=2),
    x=normal(1, 3, 8, 8),
    dynamic=("x:2=2..20", "x:3=2..20"),
)
either(
    "picture halved and doubled",
    lambda self, x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0) + x,
    x=normal(1, 3, 8, 8),
    dynamic=("x:2=2..20", "x:3=2..20"),
)
either(
    "picture shuffled",
    lambda self, x: F.pixel_unshuffle(x, 2),
    x=normal(1, 3, 8, 8),
    dynamic=("x:2=2..20",),
)
either("length by another", lambda self, x, i: x[:, i.shape[0]], x=X, i=whole(2))
either(
    "sum to one row of booleans",  # one row is booleans still
    lambda self, x: (x > 0).sum_to_size(1, 4, 8),
    x=X,
    is_quick=True,
)
