"""Small modules whose graphs hold graphs (cond, while_loop, scan) or sizes that data decide."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional

WIDTH = 8
Inputs = dict[str, Tensor]
START = torch.zeros((), dtype=torch.int64)


class Base(nn.Module):
    """Two linears, two parameters and a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Parameter(torch.randn(WIDTH))
        self.right = nn.Parameter(torch.randn(WIDTH))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("table", torch.randn(WIDTH))


class Branches(Base):
    """A branch with weights of its own; which one is taken is in the sign of the total."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        return torch.cond(
            x.sum() > 0, lambda h: torch.relu(self.up(h)), lambda h: self.down(h) - h, (hidden,)
        )


class Norm(nn.Module):
    """T5's norm, spelled out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


class NormInBranch(nn.Module):
    """Fusions have something to find, outside of a branch and in it."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Norm()
        self.inner = Norm()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.outer(self.linear(x))

        def calm(h: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(h), h.mean(-1)

        def wild(h: Tensor) -> tuple[Tensor, Tensor]:
            return functional.gelu(h), h.amax(-1)

        full, pooled = torch.cond(x.sum() > 0, calm, wild, (hidden,))
        return {"full": full, "pooled": pooled}


class Nested(Base):
    """A branch in a branch."""

    def forward(self, x: Tensor) -> Any:
        def deep(h: Tensor) -> Any:
            return torch.cond(
                h.amax() > 1.5, lambda y: torch.tanh(self.up(y)), lambda y: y * 0.5, (h,)
            )

        return torch.cond(x.mean() > 0, deep, lambda h: h.clone(), (x,)) + 1.0


class Unchanged(Base):
    """A branch that returns what it was given, once dropout is gone."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        return torch.cond(x.sum() > 0, lambda h: self.drop(h), lambda h: h * 2.0, (hidden,))


class Tied(Base):
    """Both branches and the code before them use one weight."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        return torch.cond(x.sum() > 0, lambda h: self.up(h), lambda h: self.up(h) + 1, (hidden,))


class Constants(Base):
    """Tensors that the code makes, and writes into, within a branch."""

    def forward(self, x: Tensor) -> Any:
        def fill(h: Tensor) -> Tensor:
            made = h.clone()
            made.add_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], dtype=h.dtype))
            made[:, 0] = 0.5
            made = made.relu_()
            found: Tensor = self.up(made)
            return found

        return torch.cond(x.sum() > 0, fill, lambda h: h + self.table, (x,))


class Attends(Base):
    """Attention with a mask of large numbers, in a branch."""

    def forward(self, x: Tensor) -> Any:
        def attend(h: Tensor) -> Tensor:
            query = self.up(h).view(h.shape[0], -1, 2, 4).transpose(1, 2)
            key = self.down(h).view(h.shape[0], -1, 2, 4).transpose(1, 2)
            keep = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
            mask = torch.where(keep, 0.0, -3.4e38).to(h.dtype).clamp(min=-6e4)
            found = functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
            return found.transpose(1, 2).reshape(h.shape[0], -1, WIDTH)

        return torch.cond(x.sum() > 0, attend, lambda h: self.up(h), (x,))


class Counted(Base):
    """A loop as often as a number in the input says, with a branch in its body."""

    def forward(self, x: Tensor, times: Tensor) -> Any:
        count = times.amax().clamp(max=8)

        def body(index: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.cond(
                h.sum() > 0, lambda y: self.up(y), lambda y: torch.sigmoid(y) + 0.1, (h,)
            )
            return index + 1, h

        return while_loop(lambda index, h: index < count, body, (START.clone(), x))[1]


class LoopInBranch(Base):
    """A loop in a branch, and a loop in that loop."""

    def forward(self, x: Tensor) -> Any:
        def inner(step: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return step + 1, torch.tanh(self.up(h))

        def outer(step: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return step + 1, while_loop(lambda i, h: i < 2, inner, (step * 0, h))[1] * 0.9

        def loop(h: Tensor) -> Any:
            return while_loop(lambda i, h: i < 3, outer, (START.clone(), h))[1]

        return torch.cond(x.sum() > 0, loop, lambda h: self.down(h), (x,))


class Recurrent(Base):
    """A scan over the tokens with a branch in its step."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        def step(state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.cond(
                token.sum() > 0,
                lambda s, t: torch.tanh(self.up(t) + self.down(s)),
                lambda s, t: s * 0.5 + t,
                (state, token),
            )
            return state, state * 2.0

        last, every = scan(step, x.new_zeros(x.shape[0], WIDTH), x, dim=1)
        return {"last": last, "every": every}


class Chosen(Base):
    """The tokens that a mask keeps: how many there are is known when it runs."""

    def forward(self, x: Tensor) -> Any:
        return self.up(x[x.sum(-1) > 0])


class Cut(Base):
    """As many tokens as a number in the input says, twice."""

    def forward(self, x: Tensor, length: Tensor) -> dict[str, Tensor]:
        count = int(length.amax().item())
        torch._check(count >= 1)
        torch._check(count <= x.shape[1])
        hidden = self.up(x[:, :count])
        return {"hidden": hidden, "twice": torch.cat([hidden, hidden], 1)}


class Guarded(Base):
    """An assertion on values."""

    def forward(self, x: Tensor) -> Any:
        torch._assert_async(x.abs().amax() < 100, "too large")
        return self.up(x)


class OwnLength(Base):
    """Branches that give other sizes."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        return torch.cond(
            x.sum() > 0, lambda h: h[:, :2] * 2.0, lambda h: h[:, :3] + 1.0, (hidden,)
        )


class Remembers(Base):
    """A branch that writes into a buffer."""

    def forward(self, x: Tensor) -> Any:
        def write(h: Tensor) -> Tensor:
            self.table.add_(1.0)
            return h + self.table

        return torch.cond(x.sum() > 0, write, lambda h: h * 2.0, (x,))


class OneWay(Base):
    """A branch of which no input takes one path."""

    def forward(self, x: Tensor) -> Any:
        return torch.cond((x * x).sum() >= 0, lambda h: self.up(h), lambda h: self.down(h), (x,))


def tokens() -> Inputs:
    return {"x": torch.randn(3, 5, WIDTH)}


def counted() -> Inputs:
    return {**tokens(), "times": torch.tensor([2, 0, 3])}


def cut() -> Inputs:
    return {**tokens(), "length": torch.tensor([2, 1, 3])}


@dataclass(frozen=True)
class Structured:
    """A module, an example for it, and what ONNX Runtime is to run."""

    module: type[nn.Module]
    op: str
    """Stands in the engine's graph."""
    example: Callable[[], Inputs] = tokens

    def make(self) -> tuple[nn.Module, Inputs]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.module(), self.example()


STRUCTURED = (
    Structured(Branches, "If"),
    Structured(NormInBranch, "If"),
    Structured(Nested, "If"),
    Structured(Unchanged, "If"),
    Structured(Tied, "If"),
    Structured(Constants, "If"),
    Structured(Attends, "If"),
    Structured(OwnLength, "If"),
    Structured(Counted, "Loop", counted),
    Structured(LoopInBranch, "Loop"),
    Structured(Recurrent, "Scan"),
    Structured(Chosen, "NonZero"),
    Structured(Cut, "Slice", cut),
    Structured(Guarded, "MatMul"),
)
MODELS = {case.module.__name__: case for case in STRUCTURED}
