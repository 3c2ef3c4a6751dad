"""Ops of narrow integers and of complex numbers: the engine is eager, bit by bit for integers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering import lower, run
from programs import captured
from torch import Tensor, nn

OF_INTEGERS: dict[str, Callable[[Tensor], Any]] = {
    "lower-bytes": lambda x: torch.tril(x.byte()),
    "upper-bytes": lambda x: torch.triu(x.char(), 1),
    "trace-int32": lambda x: torch.trace(x[0, 0].int() * 2**27),
    "trace-bytes": lambda x: torch.trace(x[0, 0].byte()),
}
OF_COMPLEX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b: torch.mm(a, b.T),
    "unfold": lambda a, b: a.unfold(1, 2, 2),
    "to-real": lambda a, b: a.to(torch.float64),
    "to-wide": lambda a, b: a.to(torch.complex128),
    "to-whole": lambda a, b: a.to(torch.int32),
    "add-times": lambda a, b: torch.add(a, b, alpha=2j),
    "add-real-times": lambda a, b: torch.add(a.real, b, alpha=2j),
    "sub-times": lambda a, b: torch.sub(a, b, alpha=2j),
    "divide": lambda a, b: a / b,
    "divide-by-zeros": lambda a, b: a / (b * 0),
    "divide-by-tiny": lambda a, b: a / (b * 1e-30),
    "divide-by-huge": lambda a, b: a * 1e30 / (b * 1e30),
    "divide-by-infinity": lambda a, b: a / (b / (b.real > 0)),
    "reciprocal": lambda a, b: torch.reciprocal(b * 1e-25),
    "divide-number": lambda a, b: (2 - 1j) / b,
    "sub-number": lambda a, b: torch.sub(a, 2.0, alpha=1 - 2j),
}


def _named(name: str, said: str) -> str:
    return f"{name}: {said}"


class Every(nn.Module):
    def forward(self, x: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        found = [form(x) for form in OF_INTEGERS.values()]
        a, b = torch.view_as_complex(one), torch.view_as_complex(other)
        found += [form(a, b) for form in OF_COMPLEX.values()]
        return tuple(torch.view_as_real(v) if v.is_complex() else v.clone() for v in found)


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")
@pytest.mark.slow
def test_engines_are_eager_for_integers_and_complex_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def inputs(most: int) -> tuple[Tensor, ...]:
        whole = torch.randint(-most, most, (2, 3, 7, 7))
        return whole, torch.randn(4, 5, 2), torch.randn(4, 5, 2)

    names = [*OF_INTEGERS, *OF_COMPLEX]
    lower(captured(Every(), *inputs(9)), tmp_path, [f"out_{name}" for name in names])
    for given in (inputs(9), inputs(2**40), inputs(1)):
        for name, found, eager in zip(names, run(tmp_path, *given), Every()(*given), strict=True):
            is_exact = not eager.is_floating_point()
            torch.testing.assert_close(
                *(found, eager),
                rtol=0 if is_exact else 3e-6,
                atol=0 if is_exact else 3e-6 * float(eager.nan_to_num(0, 0, 0).abs().max()),
                equal_nan=True,
                msg=partial(_named, name),
            )
