"""Special functions that ONNX has not: the engine against eager, over all of fp32 and its edges."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from lowering import lower, run
from torch import Tensor, nn

REALS: dict[str, Callable[[Tensor], Tensor]] = {
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "erfinv": torch.erfinv,
    "ndtri": torch.special.ndtri,
    "i0": torch.i0,
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
    "i1e": torch.special.i1e,
}
COUNT = 4096


class Every(nn.Module):
    def forward(self, x: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
        of_integers = torch.lgamma(whole), torch.i0(whole.byte()), torch.erfinv(whole > 0)
        return *(function(x) for function in REALS.values()), *of_integers


EDGES = (
    *(math.inf, -math.inf, math.nan, 0.0, -0.0, 1e30, -1e30, 3e38, -3e38, 1e-40, -1e-40, 1e-45),
    *(88.7, 88.73, -89.0, 91.0, 92.0, 1.2e-38, 8.0, 8.000001, -8.0, -8.000001, 9.99e16, 1.01e17),
    *(-2.457024738, -2.747682647, -3.143580888, 1.4616321, 0.85, 0.8500001, -0.85, 0.99999994),
    *(
        0.075,
        0.925,
        0.9250001,
        -8388607.5,
        -100000.5,
        -3.9999998,
        0.5,
        -0.5,
        1.5,
        -1.5,
        1e10,
        -1e10,
    ),
)


def _bits() -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (COUNT,)).int().view(torch.float32)


def _near_whole() -> Tensor:
    return -torch.randint(-4, 20, (COUNT,)) + torch.randn(COUNT) * 10 ** -(torch.rand(COUNT) * 6)


VALUES: dict[str, Callable[[], Tensor]] = {
    "edges": lambda: torch.tensor(EDGES).repeat(COUNT)[:COUNT],
    "any bits": _bits,
    "near whole numbers": _near_whole,
    "probabilities": lambda: torch.rand(COUNT) * 2 - 1,
    "wide": lambda: torch.randn(COUNT) * 60,
    "none": lambda: torch.zeros(0),
}


def _named(name: str, said: str) -> str:
    return f"{name}: {said}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("special")
    names = [f"out_{n}" for n in range(len(REALS) + 3)]
    size = torch.export.Dim("n", min=0, max=10000)
    example = torch.rand(16), torch.arange(16)
    program = torch.export.export(Every(), example, dynamic_shapes=({0: size}, {0: size}))
    lower(program, folder, names)
    return folder


@pytest.mark.parametrize("values", VALUES)
def test_special_functions_are_right_for_every_number(values: str, engine: Path) -> None:
    torch.manual_seed(3)
    x = VALUES[values]()
    whole = torch.randint(-100, 100, x.shape)
    wide = Every()(x.double(), whole)
    for place, (found, eager, exact) in enumerate(
        zip(run(engine, x, whole), Every()(x, whole), wide, strict=True)
    ):
        name = [*REALS, "lgamma of int64", "i0 of bytes", "erfinv of booleans"][place]
        is_plain = eager.isfinite()
        assert found.dtype == eager.dtype, name
        torch.testing.assert_close(  # where eager overflows in fp32, too
            found[~is_plain],
            eager[~is_plain],
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=partial(_named, name),
        )
        torch.testing.assert_close(
            found[is_plain].double(),
            exact[is_plain].double(),
            rtol=2e-7 if place < len(REALS) else 6e-7,  # eager's own in fp32
            atol=3e-45,
            msg=partial(_named, name),
        )
