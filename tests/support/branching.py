"""Modules whose control flow is harder to rewrite than one `if`; all take x: float32 [rows, 4]."""

from typing import Any

import torch
from torch import Tensor, nn

SIZE = 4


class NestedReturns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            if x.max() > 2:
                return x * 2
            y = x + 1
            if x.min() > 0.5:
                y = y - x.min()
        elif x.mean() < -1:
            return x.abs()
        else:
            y = x - 1
        return y * 3


class Scalars(nn.Module):
    """Python numbers that differ from path to path."""

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, is_large = 1.5, 0, False
        if x.abs().max() > 1:
            scale, shift, is_large = 0.25, 2, True
        y = x * scale + shift
        if is_large:
            y = y - 1
        return y


def shrink(x: Tensor, limit: float) -> Tensor:
    """A helper with a loop of its own."""
    rounds = 0
    while x.norm() > limit and rounds < 5:
        x = x / 2
        rounds += 1
    return x + rounds


class Helper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return shrink(x, 1.0)


class Structures(nn.Module):
    def forward(self, x: Tensor) -> Any:
        if x.sum() > 0:
            return {"first": x, "rest": (x * 2, None)}
        return {"first": x.abs(), "rest": (x - 1, None)}


class InPlace(nn.Module):
    """The view sees what the branch writes."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        view = y[0]
        if x.sum() > 0:
            y[0] = 7
            y.mul_(2)
        return y + view


class WhileBreak(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        count = 0
        while True:
            x = x * 0.75
            count = count + 1
            if x.abs().max() < 0.5:
                break
            if count >= 4:
                continue
            x = x - 0.01
        return x + count


class ReturnInLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.mean() > 100:
                continue
            x = torch.relu(layer(x)) + x
            if x.abs().mean() > 1:
                return x * 10
        return x


class NestedLoops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for t in range(1, x.shape[0]):
            for k in range(2):
                if x[t, k] > 0.5:
                    y = y + x[t] * k
                else:
                    y = y - 1
                    y = y * 0.5
        return y


class Parent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Super(Parent):
    def forward(self, x: Tensor) -> Tensor:
        """Calls its parent on one path."""
        if x.sum() > 0:
            x = super().forward(x)
        return x * 2


class RaiseOnValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not x.max() < 100:
            raise ValueError("too large")
        assert x.min() > -100, f"too small: {x.min()}"
        return x + 1


class NumbersInLists(nn.Module):
    """`int(...)` in a comprehension."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stack([x[int(row.argmax()), 0] for row in x[:2, :2].unbind()])
        return found + 1 if found.sum() > 0 else found


class Elif(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 5:
            y = x.sum(dim=0)
        elif x.sum() > 0:
            y = x.max(dim=0).values
        else:
            y = x.min(dim=0).values
        return torch.stack([part * 2 for part in (y, y + 1)])


class Chosen(nn.Module):
    """`and` and `or` give a value, not its truth."""

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.shape[0] == 6 and 3.0) or 1.5
        shift = ((x > 0).sum() and x.mean()) or 7.0
        is_large = x.shape[0] > 3 and x.abs().max() > 2
        return x * scale + shift if is_large else x * ((x.sum() > 0 and 2) or 5)


WORKING = (
    NestedReturns,
    Scalars,
    Helper,
    Structures,
    InPlace,
    WhileBreak,
    ReturnInLoop,
    NestedLoops,
    Super,
    RaiseOnValue,
    NumbersInLists,
    Elif,
)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[str] = []
        self.options: dict[str, int] = {}

    def count(self) -> None:
        self.calls += 1


class RebindsName(Counts):
    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0

        def grow(by: float) -> None:
            nonlocal factor
            factor += by

        if x.sum() > 0:  # HERE
            grow(1.0)
        else:
            grow(2.0)
        return x * factor


class SetsAttribute(Counts):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # HERE
            self.calls = self.calls + 1
        return x * 2


class FillsList(Counts):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.seen.append("positive")  # HERE
        return x * 2


class OtherDtype(Counts):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # HERE
            return x.to(torch.int64)
        return x


class OtherRank(Counts):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # HERE
            x = x.sum()
        return x + 1


class NoneOneWay(Counts):
    def forward(self, x: Tensor) -> Tensor:
        y = None
        if x.sum() > 0:  # HERE
            y = x
        return x if y is None else y


class RaisesDeep(Counts):
    def fail(self) -> None:
        raise ValueError("never positive")

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # HERE
            x = x * 2
            self.fail()
        return x


class GrowsUnevenly(Counts):
    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x:  # HERE
            rows.append(row[row > 0])
        return torch.cat(rows)


class Grows(Counts):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:  # HERE
            x = torch.cat([x, x * 0.1])[::2] * 0.5
            x = torch.cat([x, x])
        return x


class CatchesCheck(Counts):
    def checked(self, x: Tensor) -> Tensor:
        if x.sum() > 1000:  # HERE
            raise ValueError("too large")
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.checked(x)
        except ValueError:
            return x * 10


REFUSED = {
    RebindsName: "a branch binds 'factor' of an enclosing function anew",
    SetsAttribute: "sets self.calls",
    FillsList: "line \\d+ writes into a list",
    OtherDtype: "the returned value is torch.int64 on one path and torch.float32 on the other",
    OtherRank: "x has a tensor of torch.float32 \\[\\] on one path",
    NoneOneWay: "y is a tensor of .* on one path and NoneType None on the other",
    RaisesDeep: "one path of it fails: ValueError: never positive",
    GrowsUnevenly: "grows by tensors whose sizes differ",
    CatchesCheck: r"its error is caught at .*branching.py:\d+, and what follows is another path",
}
