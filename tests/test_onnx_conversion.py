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


def widened(x: Tensor) -> Tensor:
    return (x.to(torch.int32).to(torch.float32) @ x.contiguous().transpose(1, 2)).softmax(-1)


@pytest.mark.parametrize(
    ("computed", "times"),
    [
        (flattened, 0),
        (widened, 0),
        (lambda x: x.movedim(0, -1) * 2, 1),
        (lambda x: torch.cat(x.tensor_split(2, dim=-1)[::-1], -1), 1),
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
