"""Linear algebra that ONNX has not, for small matrices: the engine against torch in fp64."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering import lower, run
from programs import captured
from torch import Tensor, linalg, nn

from enginecast.errors import LoweringError
from enginecast.exporters.onnx.ops.linalg import _cholesky, _inverse, _solve

SIZE = 3
OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "inv": lambda a, b: linalg.inv(a),
    "solve": lambda a, b: linalg.solve(a, b),
    "solve-vector": lambda a, b: linalg.solve(a, b[..., 0]),
    "solve-broadcast": lambda a, b: linalg.solve(a, b[0]),
    "solve-right": lambda a, b: linalg.solve(a, b.mT, left=False),
    "cholesky": lambda a, b: linalg.cholesky(a @ a.mT + torch.eye(SIZE, dtype=a.dtype)),
    "power-0": lambda a, b: linalg.matrix_power(a, 0),
    "power-3": lambda a, b: linalg.matrix_power(a, 3),
    "vander": lambda a, b: linalg.vander(a[..., 0], N=7),
}


def _named(op: object, said: str) -> str:
    return f"{op}: {said}"


class Every(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(op(a, b) for op in OPS.values())


def _general() -> Tensor:
    return torch.randn(2, SIZE, SIZE)


def _without_ties() -> Tensor:
    """What needs rows to be swapped at each step."""
    return (
        torch.eye(SIZE).roll(2, 0) * 3 + torch.randn(2, SIZE, SIZE) * 1e-3 + torch.eye(SIZE) * 1e-6
    )


def _hilbert() -> Tensor:
    """Ill-conditioned: 1e8."""
    numbers = torch.arange(1.0, SIZE + 1) + 20
    return (1 / (numbers[:, None] + numbers - 1)).expand(2, SIZE, SIZE).contiguous()


MATRICES: dict[str, Callable[[], Tensor]] = {
    "general": _general,
    "swapped": _without_ties,
    "ill-conditioned": _hilbert,
    "tiny": lambda: _general() * 1e-12,
    "huge": lambda: _general() * 1e12,
    "whole": lambda: torch.randint(-3, 4, (2, SIZE, SIZE)) + 7.0 * torch.eye(SIZE),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linear")
    example = torch.randn(2, SIZE, SIZE), torch.randn(2, SIZE, 3)
    names = [f"out_{n}" for n in range(len(Every()(*example)))]
    lower(captured(Every(), *example), folder, names)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", MATRICES)
def test_linear_algebra_is_as_exact_as_fp32_can_be(kind: str, engine: Path) -> None:
    torch.manual_seed(5)
    a, b = MATRICES[kind](), torch.randn(2, SIZE, 3)
    eager, exact = Every()(a, b), Every()(a.double(), b.double())
    for found, plain, wide in zip(run(engine, a, b), eager, exact, strict=True):
        assert found.dtype == plain.dtype
        assert found.shape == plain.shape
        assert torch.equal(found.isfinite(), wide.to(found.dtype).isfinite())
        fits = found.isfinite()
        size = wide[fits].abs().max() if fits.any() else torch.tensor(1.0)
        lost = 2 * (plain[fits].double() - wide[fits]).abs().max()  # of what is made in fp32
        assert (found[fits].double() - wide[fits]).abs().max() <= torch.maximum(2e-7 * size, lost)


@pytest.mark.parametrize("last", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("upper", [True, False])
def test_what_is_not_positive_definite_has_no_factor(last: float, upper: bool) -> None:
    matrix = torch.eye(4)
    matrix[3, 3] = last
    with pytest.raises(RuntimeError, match="positive-definite"):
        linalg.cholesky(matrix, upper=upper)
    assert _cholesky(matrix, upper=upper)[3, 3].isnan()


class _Pivots(nn.Module):
    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        factors, pivots = linalg.lu_factor(a)
        return factors, pivots


@pytest.mark.parametrize(("module", "size"), [(_Pivots(), 4)])
def test_what_another_rounding_would_change_is_refused(
    module: nn.Module, size: int, tmp_path: Path
) -> None:
    with pytest.raises(LoweringError, match=r"ONNX has no form for aten\.linalg"):
        lower(captured(module, torch.randn(size, size)), tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [(), (3,), (2, 1)])
def test_forms_are_those_of_torch_for_other_sizes(batch: tuple[int, ...], size: int) -> None:
    torch.manual_seed(size)
    a = torch.randn(*batch, size, size, dtype=torch.float64)
    calls: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = [
        (_inverse, linalg.inv, (a,), {}),
        (_solve, linalg.solve, (a, torch.ones(size, 2).double()), {}),
        (_cholesky, linalg.cholesky, (a @ a.mT + torch.eye(size),), {"upper": True}),
    ]
    for form, eager, args, options in calls:
        torch.testing.assert_close(
            *(form(*args, **options), eager(*args, **options)),
            rtol=1e-8,
            atol=1e-8,
            msg=partial(_named, form),
        )
