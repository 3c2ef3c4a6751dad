"""Runs of a model that do not end by themselves, and that no read of a tensor shows."""

import threading
import time
from pathlib import Path

import pytest
import torch
from exports import cast
from torch import Tensor, nn

from enginecast.capture.control_flow.detect import recorder
from enginecast.capture.control_flow.detect.endless import Bounded
from enginecast.capture.control_flow.detect.recorder import Recorder
from enginecast.errors import CaptureError


class Spin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        count = 0
        while True:  # spin
            count += 1


class Stubborn(nn.Module):
    """Swallows every error but those that end a program."""

    def step(self, x: Tensor) -> Tensor:
        try:
            return x + 1
        except Exception:
            return x

    def forward(self, x: Tensor) -> Tensor:
        while True:
            x = self.step(x)


SOURCE = """
import torch
from torch import nn

class Spin(nn.Module):
    def forward(self, x):
        while True:
            x = x + 1

def spin(): return Spin(), {"x": torch.rand(3, 4)}
"""


def run(module: nn.Module, seconds: float) -> None:
    with Bounded(seconds), torch.no_grad():
        module(x=torch.ones(3))


def test_a_loop_without_operators() -> None:
    marked = (
        Path(__file__)
        .read_text(encoding="utf-8")
        .splitlines()
        .index(" " * 8 + "while True:  # spin")
    )
    with pytest.raises(CaptureError) as caught:
        run(Spin(), 0.4)
    assert caught.value.message.startswith(f"{__file__}:")
    line = int(caught.value.message.split(":")[1].split()[0])
    assert line in (marked + 1, marked + 2)
    assert "still ran after 0.4 s: a loop around this line has no end" in caught.value.message
    assert "called from" not in caught.value.message


def test_errors_that_the_model_swallows() -> None:
    with pytest.raises(CaptureError, match=r"test_endless.py:\d+"):
        run(Stubborn(), 0.4)


def test_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = Spin(), {"x": torch.ones(3)}
    monkeypatch.setattr("enginecast.capture.control_flow.detect.recorder.LONGEST_RUN", 0.4)
    with pytest.raises(CaptureError, match="has no end"), Recorder(module, inputs):
        module(**inputs)


def test_what_ends_is_left_alone() -> None:
    """Time outside of the model's code does not count, nor that of several calls together."""
    before = threading.active_count()
    with Bounded(0.3):
        until = time.monotonic() + 0.9
        while time.monotonic() < until:
            nn.Identity()(torch.ones(1))
    assert threading.active_count() == before


def test_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recorder, "LONGEST_RUN", 1.0)
    (tmp_path / "endless_factory.py").write_text(SOURCE, encoding="utf-8")
    ran = cast(capsys, "export", "endless_factory:spin", "-o", "bundle")
    assert ran.code == 2
    reported = ran.err
    assert "endless_factory.py:" in reported
    assert "still ran after 1 s" in reported
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "endless_factory.py"
    ]
