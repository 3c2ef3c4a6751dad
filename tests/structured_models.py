"""Small modules whose graphs hold graphs (cond, while_loop, scan) or sizes that data decide."""

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

WIDTH = 8


class Branches(nn.Module):
    """A branch with weights of its own; which one is taken is in the sign of the total."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
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
            return torch.nn.functional.gelu(h), h.amax(-1)

        full, pooled = torch.cond(x.sum() > 0, calm, wild, (hidden,))
        return {"full": full, "pooled": pooled}


class Nested(nn.Module):
    """A branch in a branch; the outer one may hand its input on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def deep(h: Tensor) -> Tensor:
            return torch.cond(
                h.amax() > 1.5, lambda y: torch.tanh(self.linear(y)), lambda y: y * 0.5, (h,)
            )

        return torch.cond(x.mean() > 0, deep, lambda h: h.clone(), (x,)) + 1.0


class Unchanged(nn.Module):
    """A branch that returns what it was given, once dropout is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return torch.cond(x.sum() > 0, lambda h: self.drop(h), lambda h: h * 2.0, (hidden,))


class Halving(nn.Module):
    """A loop with a condition on values and weights in its body."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        def going(steps: Tensor, h: Tensor) -> Tensor:
            return (h.abs().amax() > 0.5) & (steps < 20)

        def body(steps: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return steps + 1, 0.6 * torch.tanh(self.linear(h)) + 0.1 * h

        steps, h = while_loop(going, body, (torch.zeros((), dtype=torch.int64), x))
        return {"hidden": h, "steps": steps}


class Counted(nn.Module):
    """A loop as often as a number in the input says, with a branch in its body."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        count = times.amax()

        def body(index: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.cond(
                h.sum() > 0, lambda y: self.linear(y), lambda y: torch.sigmoid(y) + 0.1, (h,)
            )
            return index + 1, h

        start = (torch.zeros((), dtype=torch.int64), x)
        return while_loop(lambda index, h: index < count, body, start)[1]


class Recurrent(nn.Module):
    """A scan over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        def step(state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.enter(token) + self.again(state))
            return state, state * 2.0

        last, every = scan(step, x.new_zeros(x.shape[0], WIDTH), x, dim=1)
        return {"last": last, "every": every}


class Chosen(nn.Module):
    """The tokens that a mask keeps: how many there are is known when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x.sum(-1) > 0])


class Found(nn.Module):
    """Where something is, and a total over it."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        places = torch.nonzero(x > 0.5)
        return {"places": places, "total": x[x > 0.5].sum()}


class Cut(nn.Module):
    """As many tokens as a number in the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        count = length.amax().item()
        torch._check(count >= 1)
        torch._check(count <= x.shape[1])
        return self.linear(x[:, :count])


class Guarded(nn.Module):
    """An assertion on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async(x.abs().amax() < 100, "too large")
        return self.linear(x)


class OwnLength(nn.Module):
    """Branches that give other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return torch.cond(
            x.sum() > 0, lambda h: h[:, :2] * 2.0, lambda h: h[:, :3] + 1.0, (hidden,)
        )


def tokens() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 5, WIDTH)}


def counted() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 5, WIDTH), "times": torch.tensor([2, 0, 3])}


def cut() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 5, WIDTH), "length": torch.tensor([2, 1, 3])}


MODELS = {
    c.__name__: (c, e)
    for c, e in [
        (Branches, tokens),
        (NormInBranch, tokens),
        (Nested, tokens),
        (Unchanged, tokens),
        (Halving, tokens),
        (Counted, counted),
        (Recurrent, tokens),
        (Chosen, tokens),
        (Found, tokens),
        (Cut, cut),
        (Guarded, tokens),
        (OwnLength, tokens),
    ]
}
