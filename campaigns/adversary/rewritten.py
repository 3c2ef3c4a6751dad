"""Code that is rewritten because it branches on values, and asks for sizes besides."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, normal

CASES = Group("rewritten", "sizes in code that is rewritten")
right, either = CASES.right, CASES.either
X = normal(3, 4, 8)
SIZES = ("x:0=1..16", "x:1=1..16")
TABLE = {"4": 1.0, "9": 4.0}


class Asks(nn.Module):
    """Branches on a value, and takes a factor from something else."""

    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = x + 1
        return x * self.factor(x)


class Within(nn.Module):
    """The same on one of the paths."""

    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor(x) if x.sum() > 0 else x - 1


FACTORS = {
    "text": lambda x: 3.0 if str(x.shape[1]) == "9" else 1.0,
    "text of all": lambda x: 3.0 if "5" in repr(tuple(x.shape)) else 1.0,
    "format": lambda x: 3.0 if f"{x.shape[0]}x{x.shape[1]}" == "2x2" else 1.0,
    "type": lambda x: 3.0 if type(x.shape[1]) is int else 1.0,
    "is int": lambda x: 3.0 if isinstance(x.shape[0], int) else 1.0,
    "table": lambda x: TABLE.get(str(x.shape[1]), 2.0),
    "attribute": lambda x: getattr(F, f"relu{x.shape[1]}", F.relu)(x.abs()) + 1,
    "and, or": lambda x: (x.shape[1] == 7 and 3.0) or 1.0,
    "and of values": lambda x: (x.sum() > 0 and 3.0) or 1.0,
    "remainder, or": lambda x: x.shape[1] % 3 or 7,
    "equal": lambda x: 3.0 if x.shape[0] == 5 else 1.0,
    "one": lambda x: 3.0 if x.shape[1] == 1 else 1.0,
    "in a tuple": lambda x: 3.0 if x.shape[1] in (2, 9, 13) else 1.0,
    "product": lambda x: 3.0 if x.shape[0] * x.shape[1] == 35 else 1.0,
    "bits": lambda x: (x.shape[1] & 7) + (x.shape[1] ^ 5),
    "binary": lambda x: bin(x.shape[1]).count("1"),
    "stride": lambda x: 3.0 if x.stride(0) == 40 else 1.0,
    "root": lambda x: int(x.shape[1] ** 0.5),
    "list": lambda x: [1.0, 2.0, 3.0, 4.0][min(x.shape[1], 3)],
    "pieces": lambda x: len(x.split(4, 1)),
    "exporting": lambda x: 3.0 if torch.compiler.is_exporting() else 1.0,
}
for name, factor in FACTORS.items():
    either(name, partial(Asks, factor), x=X, dynamic=SIZES)
    either(f"{name} on a path", partial(Within, factor), x=X, dynamic=SIZES)


class Lambda(nn.Module):
    """A branch that is not rewritten, so that a program takes one path."""

    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y = (lambda z: z * 2 if bool(z.sum() > 0) else z * 3)(x)
        return y * self.factor(x)


class Traced(nn.Module):
    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor(x)


ONE = {"batch of one": lambda x: 3.0 if x.shape[0] == 1 else 1.0}
for name, factor in {**FACTORS, **ONE}.items():
    either(f"{name} on one path", partial(Lambda, factor), x=X, fallback="specialise")
    either(
        f"{name} on one path, asked",
        partial(Lambda, factor),
        x=X,
        fallback="specialise",
        dynamic=SIZES,
    )
    either(
        f"{name} in torchscript",
        partial(Traced, factor),
        x=X,
        target="torchscript",
        dynamic=SIZES,
    )


class Heads(nn.Module):
    """One layer for a length, and one for all others."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"9": nn.Linear(8, 8), "else": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = x + 1
        key = str(x.shape[1])
        out: Tensor = self.heads[key if key in self.heads else "else"](x)
        return out


class Closure(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        name = f"n{x.shape[1]}"

        def factor() -> float:
            return 5.0 if name == "n9" else 1.0

        return x * factor() if x.mean() > 0 else x - factor()


class Rounds(nn.Module):
    """A loop over the length, whose body asks for its index."""

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, 0] * 0
        for t in range(x.shape[1]):
            y = y + x[:, t] * len(str(t)) if t % 2 else y * 0.9
        return y


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = x + 1
        return x.squeeze(0).sum(0)


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = (x.shape[1] == 7 and 3.0) or 1.0
        return x * scale * ((x.sum() > 0 and 2.0) or 5.0)


class Resizes(nn.Module):
    def __init__(self, resize: Any) -> None:
        super().__init__()
        self.resize = resize

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = x + 1
        out: Tensor = self.resize(x)
        return out


right("and, or, as values", Chosen, x=X, dynamic=SIZES)
for module in (Heads, Closure, Rounds, Squeezed):
    either(module.__name__, module, x=X, dynamic=SIZES)
RESIZES = {
    "1.3": lambda x: F.interpolate(x.mT, scale_factor=1.3),
    "1.1 linearly": lambda x: F.interpolate(x.mT, scale_factor=1.1, mode="linear"),
    "1.3 bilinearly": lambda x: F.interpolate(
        x.mT[..., None] + x[:, 0, :, None, None], scale_factor=1.3, mode="bilinear"
    ),
    "2.3 of pictures": lambda x: F.interpolate(x.mT[..., None], scale_factor=(2.3, 1.0)),
}
for name, resize in RESIZES.items():
    right(f"resized by {name}", lambda self, x, do=resize: do(x), x=X, dynamic=SIZES)
    right(f"resized by {name} beside a branch", partial(Resizes, resize), x=X, dynamic=SIZES)
