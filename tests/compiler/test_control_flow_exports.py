"""Modules with control flow, from Python code to engines that are right on both paths."""

from pathlib import Path

import numpy as np
import pytest
import torch
from control_flow import BRANCHES, Row
from torch import Tensor, nn

from enginecast.api import compile as export
from enginecast.compiler.export.session import export as run_export
from enginecast.compiler.request import ExportRequest
from enginecast.compiler.steps import Steps
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.load import load

QUICK = ("ForShape",)
"""A loop, and a write in a branch.  Rounds that are data, and blocks within blocks, are exported by
default in test_structured_exports.py (`Counted`), and rewritten in test_restructure.py."""


def marked(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.slow]


def published(module: nn.Module, example: dict[str, Tensor], folder: Path) -> Bundle:
    bundle = export(module, folder, example=example)
    [engine] = bundle.manifest.engines
    assert (engine.target, engine.verdict.outcome) == ("onnxruntime", "verified")
    assert bundle.manifest.capture[-1].name == "rewrite"
    return bundle


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=r.name, marks=marked(r.name)) for r in BRANCHES]
)
def test_engines_are_right_on_both_paths(row: Row, tmp_path: Path) -> None:
    module = row.module()
    bundle = published(module, row.a(), tmp_path / "bundle")
    with load(bundle.root) as engine:
        for inputs in (row.a(), row.b()):
            found = engine.run({name: tensor.numpy() for name, tensor in inputs.items()})
            expected = module(**inputs).detach().numpy()
            np.testing.assert_allclose(found["output_0"], expected, rtol=1e-4, atol=1e-5)


class OnlyLarge(nn.Module):
    """Small sizes have a form in ONNX, large ones have none."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 5:
            x = torch.special.bessel_j0(x)
            return x
        return x * 2


def test_what_cannot_be_lowered_in_all_sizes_is_exported_in_some(tmp_path: Path) -> None:
    steps = Steps()
    example = {"x": torch.rand(3, 4)}
    bundle = export(OnlyLarge(), tmp_path / "bundle", example=example, steps=steps)
    assert bundle.manifest.symbols == {}
    assert [rung.name for rung in bundle.manifest.capture] == ["export"]
    assert any("bessel_j0" in line for line in steps.lines)


class Masked(nn.Module):
    """Drops a mask that masks nothing."""

    def __init__(self, other: float) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask = ids.eq(0)
        if not mask.any():
            mask = None  # type: ignore[assignment]
        if mask is None:
            return x.softmax(-1) + self.other
        return x.masked_fill(mask, -1e4).softmax(-1)


@pytest.mark.parametrize(("other", "outcome"), [(0.0, "verified"), (0.1, "rejected")])
@pytest.mark.slow
def test_a_tensor_that_a_path_drops_is_kept(other: float, outcome: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (3, 4), generator=generator)
    example = {"x": torch.randn(3, 4, generator=generator), "ids": ids}

    done = run_export(ExportRequest(Masked(other).eval(), tmp_path / "out", example=example))

    assert done.report.verdict.outcome == outcome
    if done.bundle is not None:
        with load(done.bundle.root) as engine:
            for shift in (0, 1):
                feeds = {"x": example["x"], "ids": (ids + shift).clamp(max=8)}
                found = engine.run({name: tensor.numpy() for name, tensor in feeds.items()})
                expected = Masked(other)(**feeds).numpy()
                np.testing.assert_allclose(found["output_0"], expected, rtol=1e-5, atol=1e-6)
