"""Code that leads around a capture: what is published must be right, or nothing is."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from enginecast.compiler.export.session import export
from enginecast.compiler.publication.bundle import Export
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import CaptureError, InputError
from enginecast.runtime.load import load

pytestmark = pytest.mark.all_sizes


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


class AreaBySeven(nn.Module):
    """No range says of two dimensions that their product is not a multiple of seven."""

    def forward(self, x: Tensor) -> Tensor:
        if (x.shape[0] * x.shape[1]) % 7 == 0:
            return x * 7
        return x * 2


def exported(module: nn.Module, folder: Path, *dynamic: str) -> Export:
    example = {"x": torch.rand(3, 4, generator=torch.Generator().manual_seed(0))}
    options = ModelOptions(dynamic=dynamic)
    return export(
        ExportRequest(module, str(folder / "bundle"), options=options, example=example, threads=1)
    )


@pytest.mark.parametrize("make", [TernaryInTry])
def test_a_path_that_only_eager_takes_is_found(make: type[nn.Module], tmp_path: Path) -> None:
    done = exported(make(), tmp_path)
    assert done.bundle is None
    assert any("other path at test_silently_wrong.py:" in r for r in done.report.verdict.reasons)


def test_a_path_that_code_hides_from_a_trace_is_rejected(tmp_path: Path) -> None:
    done = exported(NotWhileCompiling(), tmp_path)
    assert done.bundle is None
    assert any("test_silently_wrong.py:" in reason for reason in done.report.verdict.reasons)


def test_sizes_that_no_range_tells_apart_are_refused_by_the_engine(tmp_path: Path) -> None:
    bundle = exported(AreaBySeven(), tmp_path, "x:0=1..64", "x:1=1..64").bundle
    assert bundle is not None
    assert [check.condition for check in bundle.manifest.size_checks] == ["((batch*x_1) % 7) != 0"]
    assert any("takes only sizes with" in note for note in bundle.manifest.notes)
    with load(bundle.root) as engine:
        for shape in ((1, 1), (3, 4), (6, 8), (64, 64)):
            x = np.ones(shape, np.float32)
            np.testing.assert_array_equal(engine.run({"x": x})["output_0"], x * 2)
        for shape in ((1, 7), (7, 1), (63, 64), (14, 14)):
            with pytest.raises(
                InputError, match=r"expected sizes with \(\(batch\*x_1\) % 7\) != 0"
            ):
                engine.run({"x": np.ones(shape, np.float32)})


class SevenRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 7 if x.shape[0] == 7 else x * 2


def test_small_sizes_are_tried_for_the_path_they_take(tmp_path: Path) -> None:
    bundle = exported(SevenRows(), tmp_path, "x:0=1..16").bundle
    assert bundle is not None
    with load(bundle.root) as engine:
        for rows, factor in ((1, 2), (7, 7), (16, 2)):
            x = np.ones((rows, 4), np.float32)
            np.testing.assert_array_equal(engine.run({"x": x})["output_0"], x * factor)


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
