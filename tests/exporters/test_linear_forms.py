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
from enginecast.exporters.onnx.passes.linear_forms import LINEAR, SEVERAL, VANDER

pytestmark = pytest.mark.filterwarnings("ignore:.*triangular_solve is deprecated:UserWarning")
PIVOTS = torch.tensor([[3, 3, 3], [1, 3, 3]], dtype=torch.int32)
SIZE = 3
aten = torch.ops.aten
OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "inv": lambda a, b: linalg.inv(a),
    "solve": lambda a, b: linalg.solve(a, b),
    "solve-vector": lambda a, b: linalg.solve(a, b[..., 0]),
    "solve-broadcast": lambda a, b: linalg.solve(a, b[0]),
    "solve-right": lambda a, b: linalg.solve(a, b.mT, left=False),
    "slogdet": lambda a, b: linalg.slogdet(a),
    "cholesky": lambda a, b: linalg.cholesky(a @ a.mT + torch.eye(SIZE, dtype=a.dtype)),
    "triangular": lambda a, b: linalg.solve_triangular(a, b, upper=True),
    "triangular-right": lambda a, b: linalg.solve_triangular(
        a, b.mT, upper=False, left=False, unitriangular=True
    ),
    "triangular-old": lambda a, b: torch.triangular_solve(b, a, transpose=True),
    "cholesky-solve": lambda a, b: torch.cholesky_solve(b, a, True),
    "lu-solve": lambda a, b: linalg.lu_solve(a, PIVOTS, b),
    "lu-solve-adjoint": lambda a, b: linalg.lu_solve(a, PIVOTS, b, adjoint=True),
    "lu-solve-right": lambda a, b: linalg.lu_solve(a, PIVOTS, b.mT, left=False),
    "lu-unpack": lambda a, b: torch.lu_unpack(a, PIVOTS),
    "householder": lambda a, b: linalg.householder_product(a / 4, b[..., 0] / 4),
    "ormqr": lambda a, b: torch.ormqr(a / 4, b[..., 0] / 4, b, True, True),
    "power-0": lambda a, b: linalg.matrix_power(a, 0),
    "power-3": lambda a, b: linalg.matrix_power(a, 3),
    "power-minus-2": lambda a, b: linalg.matrix_power(a, -2),
    "vander": lambda a, b: linalg.vander(a[..., 0], N=7),
    "tensorinv": lambda a, b: linalg.tensorinv(a[0].reshape(SIZE, SIZE, 1), 1),
    "tensorsolve": lambda a, b: linalg.tensorsolve(a[0].reshape(SIZE, 1, SIZE), b[0, :, :1]),
}


def _named(op: object, said: str) -> str:
    return f"{op}: {said}"


class Every(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for op in OPS.values():
            result = op(a, b)
            found += list(result) if isinstance(result, tuple) else [result]
        return tuple(found)


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


class Few(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return linalg.solve(a, b), *linalg.slogdet(a)


def test_systems_are_solved_as_exactly_as_fp32_can_say(tmp_path: Path) -> None:
    example = torch.randn(2, SIZE, SIZE), torch.randn(2, SIZE, 3)
    lower(captured(Few(), *example), tmp_path, ("x", "sign", "log"))
    for matrices in MATRICES.values():
        a, b = matrices(), torch.randn(2, SIZE, 3)
        exact = Few()(a.double(), b.double())
        for found, wide in zip(run(tmp_path, a, b), exact, strict=True):
            torch.testing.assert_close(
                found.double(), wide, rtol=0, atol=2e-7 * float(wide.abs().max())
            )


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


@pytest.mark.slow
def test_what_torch_raises_an_error_for_is_not_finite(engine: Path) -> None:
    singular = torch.ones(2, SIZE, SIZE)
    found = run(engine, singular, torch.randn(2, SIZE, 3))
    assert found[0].isnan().all()
    assert found[1].isnan().all()
    zeros = run(engine, torch.zeros(2, SIZE, SIZE), torch.randn(2, SIZE, 3))
    sign, log = linalg.slogdet(torch.zeros(2, SIZE, SIZE))
    places = list(OPS).index("slogdet")
    assert torch.equal(zeros[places], sign)
    assert torch.equal(zeros[places + 1], log)
    assert zeros[0].isnan().all()


@pytest.mark.parametrize("last", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("upper", [True, False])
def test_what_is_not_positive_definite_has_no_factor(last: float, upper: bool) -> None:
    matrix = torch.eye(4)
    matrix[3, 3] = last
    with pytest.raises(RuntimeError, match="positive-definite"):
        linalg.cholesky(matrix, upper=upper)
    assert LINEAR[aten.linalg_cholesky.default](matrix, upper=upper)[3, 3].isnan()


class _Pivots(nn.Module):
    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        factors, pivots = linalg.lu_factor(a)
        return factors, pivots


class _Large(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        found: Tensor = linalg.inv(a)
        return found


@pytest.mark.parametrize(("module", "size"), [(_Pivots(), 4), (_Large(), 65)])
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
    b = torch.randn(*batch, size, 4, dtype=torch.float64)
    lu, pivots = linalg.lu_factor(a)
    tall, tau = torch.geqrf(torch.randn(*batch, size + 2, size, dtype=torch.float64))
    wide_lu, wide_pivots = linalg.lu_factor(torch.randn(*batch, size, size + 3))
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.linalg_inv.default, (a,), {}),
        (aten.linalg_solve.default, (a, torch.ones(size, 2).double()), {}),
        (aten.linalg_cholesky.default, (a @ a.mT + torch.eye(size),), {"upper": True}),
        (aten.linalg_slogdet.default, (a,), {}),
        (aten.lu_unpack.default, (wide_lu, wide_pivots), {}),
        (aten.lu_unpack.default, (wide_lu, wide_pivots, False), {}),
        (aten.linalg_householder_product.default, (tall, tau), {}),
        (aten.ormqr.default, (tall, tau, tall.mT.contiguous(), False, True), {}),
        *((aten.linalg_matrix_power.default, (a, power), {}) for power in (-1, 0, 1, 5)),
        (VANDER[0], (a[..., 0],), {"N": 6}),
    ]
    calls += [
        (aten.linalg_lu_solve.default, (lu, pivots, b if left else b.mT), options)
        for left in (True, False)
        for options in ({"left": left, "adjoint": True}, {"left": left, "adjoint": False})
    ]
    calls += [
        (aten.linalg_solve_triangular.default, (a, b), {"upper": upper, "unitriangular": unit})
        for upper in (True, False)
        for unit in (True, False)
    ]
    forms = {**LINEAR, **SEVERAL, VANDER[0]: VANDER[1]}
    for op, args, options in calls:
        found, eager = forms[op](*args, **options), op(*args, **options)
        pairs = zip(found, eager, strict=True) if isinstance(found, tuple) else [(found, eager)]
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8, msg=partial(_named, op))
