"""Dimensions that torch.export drops without a word: reported, recorded and enforced."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import Ran, cast
from safetensors.torch import save_file

import enginecast
from enginecast.errors import InputError

Capture = pytest.CaptureFixture[str]

SOURCE = """
import torch
from torch import nn

class Square(nn.Module):
    def forward(self, x):
        return x @ x + x.mT  # square: the last two sizes must be equal

class Branch(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] < 6 else x - 1  # branch

class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return x + self.rows  # fixed: five rows

class Plain(nn.Module):
    def forward(self, x, y):
        return x.sum(0) + y.amax(0)  # two leading sizes that have nothing to do with each other

def square(): return Square(), {"x": torch.randn(3, 4, 4)}
def branch(): return Branch(), {"x": torch.randn(3, 4)}
def fixed(): return Fixed(), {"x": torch.randn(3, 5, 4)}
def plain(): return Plain(), {"x": torch.randn(4, 7), "y": torch.randn(4, 7)}
"""


@pytest.fixture(autouse=True)
def _where_the_factories_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shape_factories.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def export(capsys: Capture, name: str, *options: object) -> Ran:
    return cast(capsys, "export", f"shape_factories:{name}", "-o", "out", "--threads", 1, *options)


def line(mark: str) -> str:
    number = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if f"# {mark}" in text)
    return f"shape_factories.py:{number}"


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "square",
            ["--dynamic", "x:1=2..9", "--dynamic", "x:2=2..9"],
            ["x_1=4, x_2=5", line("square")],
        ),
        ("square", ["--dynamic", "x:1=2..9"], ["x_1=5", line("square")]),
        ("branch", ["--fallback", "none", "--dynamic", "x:0=1..9"], ["batch <= 5", line("branch")]),
        (
            "fixed",
            ["--fallback", "none", "--dynamic", "x:1=2..9"],
            ["x_1 is always 5", line("fixed")],
        ),
    ],
)
def test_a_range_that_was_asked_for_and_cannot_be_kept_is_refused(
    capsys: Capture, name: str, options: list[str], expected: list[str]
) -> None:
    done = export(capsys, name, *options)
    reported = " ".join(done.err.split())
    assert done.code == 2, done
    assert all(text in reported for text in expected), reported
    assert "--dynamic" in reported
    assert "prepare.py" not in reported  # ours is not the code to blame
    assert not Path("out").exists()


def test_a_range_that_is_kept_is_right_in_all_of_it(capsys: Capture) -> None:
    """A strict export of torch 2.13 with fake inputs drops the guard: one path for all."""
    done = export(capsys, "branch", "--dynamic", "x:0=1..9")
    if done.code:
        assert done.code == 2
        return
    with engine_of(done) as engine:
        for rows in (1, 5, 6, 9):
            x = np.ones((rows, 4), np.float32)
            wanted = x * 2 if rows < 6 else x - 1
            np.testing.assert_array_equal(engine.run({"x": x})["output_0"], wanted)


def engine_of(done: Ran) -> Any:
    assert done.code == 0, done.err
    return enginecast.load("out", threads=1)


def test_a_range_that_was_not_asked_for_is_narrowed_recorded_and_enforced(capsys: Capture) -> None:
    done = export(capsys, "branch", "--fallback", "none")
    with engine_of(done) as engine:
        assert engine.manifest.symbols == {"batch": (1, 5)}
        for rows in (1, 5):
            x = np.ones((rows, 4), np.float32)
            np.testing.assert_array_equal(engine.run({"x": x})["output_0"], x * 2)
        with pytest.raises(InputError, match=r"input 'x': dimension 0 of \[batch, 4\]"):
            engine.run({"x": np.ones((6, 4), np.float32)})
    assert "batch takes 1..5, not 1..64" in " ".join(done.err.split())
    assert line("branch") in done.err


def test_given_inputs_of_one_row_are_static_and_say_so_at_run_time(capsys: Capture) -> None:
    save_file({"x": torch.randn(1, 4)}, "one.safetensors")
    with engine_of(export(capsys, "branch", "--inputs", "one.safetensors")) as engine:
        assert engine.inputs[0].shape == (1, 4)
        with pytest.raises(InputError, match="expected 1, got 2"):
            engine.run({"x": np.ones((2, 4), np.float32)})


def test_given_inputs_of_one_row_may_vary_when_asked(capsys: Capture) -> None:
    save_file({"x": torch.randn(1, 4)}, "one.safetensors")
    options = ("--inputs", "one.safetensors", "--dynamic", "x:0=1..5")
    with engine_of(export(capsys, "branch", *options)) as engine:
        assert list(engine.manifest.symbols.values()) == [(1, 5)]
        for rows in (1, 2, 5):
            x = np.ones((rows, 4), np.float32)
            np.testing.assert_array_equal(engine.run({"x": x})["output_0"], x * 2)


def test_equal_sizes_in_the_example_do_not_tie_dimensions(capsys: Capture) -> None:
    options = ("--dynamic", "x:0=1..9", "--dynamic", "x:1=2..9", "--dynamic", "y:1=2..9")
    done = export(capsys, "plain", *options)
    reported = " ".join(done.err.split())
    assert done.code == 2, reported  # the sum ties the last sizes, and they were asked for apart
    assert "x [batch=4, x_1=7]; y [batch=4, y_1=8]" in reported, reported
    with engine_of(export(capsys, "plain", "--dynamic", "x:0=1..9")) as engine:
        assert engine.inputs[0].shape == engine.inputs[1].shape == ("batch", 7)
