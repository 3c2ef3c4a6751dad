"""Complex values inside a program: ops that torch.onnx has no form for, by their two parts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowering import lower, run
from programs import Function, captured
from torch import Tensor
from torch.nn import functional as F

Op = Callable[[Tensor, Tensor], Tensor]
OPS: dict[str, Op] = {
    "select": lambda x, y: x[:, 1] + y[-1],
    "expand": lambda x, y: x[None].expand(2, 4, 4) * y,
    "flip and roll": lambda x, y: x.flip(0) + y.roll(1, 1),
    "split": lambda x, y: x.split(3, 0)[1] + y.chunk(2, 0)[1][:1] + x.unbind(0)[2],
    "choose": lambda x, y: torch.where(x.abs() > 1, x, y),
    "choose a number": lambda x, y: torch.where(y.abs() > 1, x, 0.5),
    "fill": lambda x, y: x.masked_fill(y.real > 0, 2.0),
    "pad": lambda x, y: F.pad(x, (1, 2), value=3.0)[:, :4] + y,
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "einsum of three": lambda x, y: torch.einsum("ij,kj,kl->il", x, y, x),
    "product of batches": lambda x, y: torch.bmm(x[None], y[None]),
    "exponential": lambda x, y: torch.exp(x) * y,
    "a number": lambda x, y: 1j * x.real + y,
    "unit": lambda x, y: torch.sgn(x) + torch.sgn(y * 0),
    "sums so far": lambda x, y: x.cumsum(1) + y,
    "write a part": lambda x, y: torch.zeros(4, 8, dtype=x.dtype).slice_scatter(x * y, 1, 2, 6),
    "powers": lambda x, y: x**2 + y.square() * x**0 + y**5,
    "angle": lambda x, y: x * torch.angle(y),
    "conjugate": lambda x, y: x + y.conj_physical() * x,
    "put": lambda x, y: x.index_put((torch.tensor([0, 2, 2]),), y[:3], accumulate=True),
    "of real ones": lambda x, y: torch.where(x.real == y.real, x, y.abs().to(x.dtype)),
    "norm": lambda x, y: (
        torch.linalg.vector_norm(x, dim=1) + torch.linalg.vector_norm(y, 3.0, 0) * 1j
    ),
}


@pytest.mark.slow
def test_engines_compute_complex_values_as_torch(tmp_path: Path) -> None:
    def every(x: Tensor, y: Tensor) -> list[Tensor]:
        one, other = torch.view_as_complex(x), torch.view_as_complex(y)
        return [torch.view_as_real(op(one, other).resolve_conj()) for op in OPS.values()]

    module = Function(every)
    x, y = torch.randn(4, 4, 2), torch.randn(4, 4, 2)
    lower(captured(module, x, y), tmp_path, [f"out_{at}" for at in range(len(OPS))])
    for pair in ((x, y), (y * 3, x), (x.round(), x.round())):
        for name, found, wanted in zip(OPS, run(tmp_path, *pair), module(*pair), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=name)
