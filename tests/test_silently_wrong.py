"""Code that leads around a capture: what is published must be right, or nothing is."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from enginecast.compiler.publish import Export
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.compiler.session import export
from enginecast.errors import CaptureError, VerificationError
from enginecast.runtime.load import load


class NotWhileCompiling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and (x > 100).any():
            x = x.clamp(max=100.0)
        return x * 2


class TernaryInTry(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            factor = 3.0 if x.sum() > 40 else 2.0
        except RuntimeError:
            factor = 2.0
        return x * factor


class OnlyFloats(nn.Module):
    """While it is captured, what `item` gives is a SymFloat."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum().item()
        if isinstance(total, float) and total > 40:
            return x * 5
        return x * 2


class AreaBySeven(nn.Module):
    """No range says of two dimensions that their product is not a multiple of seven."""

    def forward(self, x: Tensor) -> Tensor:
        if (x.shape[0] * x.shape[1]) % 7 == 0:
            return x * 7
        return x * 2


class Proved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        count = (x > 0).sum().clamp(max=5).item()
        torch._check(count >= 0)
        torch._check(count <= 5)
        return x * 2 if count < 6 else x * 3


def exported(module: nn.Module, folder: Path, *dynamic: str) -> Export:
    example = {"x": torch.rand(3, 4, generator=torch.Generator().manual_seed(0))}
    options = ModelOptions(dynamic=dynamic)
    return export(
        ExportRequest(module, str(folder / "bundle"), options=options, example=example, threads=1)
    )


@pytest.mark.parametrize("make", [NotWhileCompiling, TernaryInTry, OnlyFloats])
def test_a_path_that_only_eager_takes_is_found(make: type[nn.Module], tmp_path: Path) -> None:
    done = exported(make(), tmp_path)
    assert done.bundle is None
    assert any("other path at test_silently_wrong.py:" in r for r in done.report.verdict.reasons)


def test_sizes_that_no_range_tells_apart_are_verified(tmp_path: Path) -> None:
    done = exported(AreaBySeven(), tmp_path, "x:0=1..64", "x:1=1..64")
    assert done.bundle is None
    assert any("sizes that the code tells apart" in r for r in done.report.verdict.reasons)


def test_what_torch_has_proved_needs_no_other_path(tmp_path: Path) -> None:
    assert exported(Proved(), tmp_path).bundle is not None


class SecondRow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[1] + x


def test_a_program_that_does_not_run_at_some_size_is_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="does not run in all its sizes"):
        exported(SecondRow(), tmp_path)


def tenfold(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def run(self: nn.Module, x: Tensor) -> Tensor:
        y = forward(self, x)
        return y * 10 if y.sum() > 30 else y

    return run


class Decorated(nn.Module):
    @tenfold
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_script_does_not_leave_a_decorator_out(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="leave out the decorator of Decorated"):
        exported(Decorated(), tmp_path)


class Thirds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (int(x.sum()) // 3)


def test_python_divides_integers_downwards(tmp_path: Path) -> None:
    bundle = exported(Thirds(), tmp_path).bundle
    assert bundle is not None
    x = torch.full((1, 4), -1.0)
    with load(bundle.root) as engine:
        assert engine.run({"x": x.numpy()})["output_0"].tolist() == [[2.0] * 4]
