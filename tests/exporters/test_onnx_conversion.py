"""When torch.onnx traces a program again: where it would write an op by others, and only there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering import lower, run
from programs import Function, captured
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was traced again, one entry for each time."""
    found: list[str] = []
    decompose = ExportedProgram.run_decompositions

    def counted(program: ExportedProgram, *args: Any, **options: Any) -> ExportedProgram:
        found.append(type(program).__name__)
        traced: ExportedProgram = decompose(program, *args, **options)
        return traced

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return found


def flattened(x: Tensor) -> Tensor:
    return x.to(torch.float32).flatten(1) + 1


@pytest.mark.parametrize(
    ("computed", "times"),
    [
        (flattened, 0),
        (lambda x: torch.outer(x[0, 0], x[:, 0, 0]) + 1, 0),
        (lambda x: nn.functional.huber_loss(x, x.sin()), 1),
        (lambda x: torch.cond(x.sum() > 0, lambda y: y.mT * 2, lambda y: y.mT - 1, (x,)), 1),
    ],
)
def test_only_what_is_decomposed_is_traced_again(
    computed: Callable[[Tensor], Tensor], times: int, traces: list[str], tmp_path: Path
) -> None:
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0)) * 3
    module: nn.Module = Function(computed)
    program = captured(module, x, dynamic={0: Dim("n", max=8)})
    before = len(traces)
    lower(program, tmp_path)
    assert len(traces) - before == times
    [found] = run(tmp_path, x[:2])
    torch.testing.assert_close(found, computed(x[:2]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("affine", [True, False])
def test_norms_by_kept_statistics_need_no_trace(
    affine: bool, traces: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(3, affine=affine), nn.BatchNorm2d(3, eps=0.1)
    for norm in norms:
        norm.reset_running_stats()
        with torch.no_grad():
            norm(torch.randn(4, 3, 5, 5) * 3 + 1)
    module = nn.Sequential(norms[0], nn.ReLU(), norms[1])
    x = torch.randn(2, 3, 4, 5)
    program = captured(module.eval(), x, dynamic={0: Dim("n", max=8)})
    before = len(traces)
    lower(program, tmp_path)
    assert len(traces) == before
    [found] = run(tmp_path, x[:1])
    torch.testing.assert_close(found, module(x[:1]).detach(), rtol=1e-5, atol=1e-6)
