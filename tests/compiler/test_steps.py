"""Dimensions that vary in steps, as those of a UNet do, and such that are tied by a name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from exports import cast
from torch import Tensor, nn
from torch.nn import functional as F

import enginecast
from enginecast.errors import InputError

Capture = pytest.CaptureFixture[str]

SOURCE = """
import sys  # whose modules a trace must not forget

import torch
from torch import nn
from torch.nn import functional as F

class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, sample):
        first = self.first(sample)
        down = self.down(first)
        deep = F.interpolate(self.deep(down).relu(), scale_factor=2.0) + down
        return self.last(torch.cat([F.interpolate(deep, scale_factor=2.0), first], 1))

def halved():
    torch.manual_seed(0)
    return Halved(), {"sample": torch.randn(2, 3, 16, 16)}
"""


@pytest.mark.slow
def test_a_unet_is_published_with_steps(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step_factories.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ranges = ("--dynamic", "sample:2=8..64/8,sample:3=8..64/8")
    done = cast(capsys, "export", "step_factories:halved", "-o", "out", "--threads", 1, *ranges)
    assert done.code == 0, done.err
    with enginecast.load("out", threads=1) as engine:
        assert engine.inputs[0].shape == ("batch", 3, "sample_2", "sample_3")
        assert engine.outputs[0].shape == ("batch", 3, "sample_2", "sample_3")
        assert engine.manifest.symbols["sample_2"] == (8, 64)
        assert engine.manifest.steps == {"sample_2": 8, "sample_3": 8}
        shape = engine.run({"sample": np.ones((1, 3, 64, 8), np.float32)})["output_0"].shape
        assert shape == (1, 3, 64, 8)
        with pytest.raises(
            InputError, match=r"expected sample_3 in 8\.\.64, a multiple of 8, got 12"
        ):
            engine.run({"sample": np.ones((1, 3, 8, 12), np.float32)})
    done = cast(capsys, "verify", "out", "--model", "step_factories:halved", "--threads", 1)
    assert done.code == 0, done.err


class Tied(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) + y


def test_dimensions_that_are_tied_by_a_name_are_published(tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 6, 4), "y": torch.randn(6, 4)}
    names = ["x:1=length:1..40", "y:0=length"]
    bundle = enginecast.compile(Tied(), tmp_path / "out", example=example, dynamic=names)
    assert [spec.shape for spec in bundle.manifest.inputs] == [
        ("batch", "length", 4),
        ("length", 4),
    ]
    assert bundle.manifest.symbols["length"] == (1, 40)
