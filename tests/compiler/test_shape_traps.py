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

pytestmark = pytest.mark.all_sizes

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

class OneRow(nn.Module):
    def forward(self, x):
        if x.shape[0] == 1:
            return x * 2  # one row
        return x + 1

class Product(nn.Module):
    def forward(self, x):
        if x.shape[0] * x.shape[1] * x.shape[2] == 991 * 997:
            return x * 2
        return x + 1  # product

class Printed(nn.Module):
    def forward(self, x):
        if len(str(x.shape[0])) == 2:
            return x * 2  # printed
        return x + 1

class Typed(nn.Module):
    def forward(self, x):
        if isinstance(x.shape[0], int) and x.shape[0] == 37:
            return x * 2  # typed
        return x + 1

class Squeezed(nn.Module):
    def forward(self, x):
        return x.squeeze(0).sum(0)

class Ids(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, input_ids):
        x = self.table(input_ids)
        if input_ids.shape[0] * input_ids.shape[1] == 35:
            return x * 2  # ids
        return x

class Steps(nn.Module):
    def forward(self, x):
        return torch.arange(0, x.shape[0], 0.7) + x.sum()

def steps(): return Steps(), {"x": torch.randn(3, 4)}
def one_row(): return OneRow(), {"x": torch.randn(3, 4)}
def product(): return Product(), {"x": torch.randn(3, 4, 5)}
def printed(): return Printed(), {"x": torch.randn(3, 4)}
def typed(): return Typed(), {"x": torch.randn(3, 4)}
def squeezed(): return Squeezed(), {"x": torch.randn(3, 4)}
def ids(): return Ids(), {"input_ids": torch.randint(16, (3, 8))}
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
        ("branch", ["--fallback", "none", "--dynamic", "x:0=1..9"], ["batch <= 5", line("branch")]),
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
    assert "program.py" not in reported  # ours is not the code to blame
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


def test_equal_sizes_in_the_example_do_not_tie_dimensions(capsys: Capture) -> None:
    options = ("--dynamic", "x:0=1..9", "--dynamic", "x:1=2..9", "--dynamic", "y:1=2..9")
    done = export(capsys, "plain", *options)
    reported = " ".join(done.err.split())
    assert done.code == 2, reported  # the sum ties the last sizes, and they were asked for apart
    assert "x [batch=5, x_1=7]; y [4, y_1=8]" in reported, reported
    with engine_of(export(capsys, "plain", "--dynamic", "x:0=1..9")) as engine:
        assert engine.inputs[0].shape == ("batch", 7)
        assert engine.inputs[1].shape == ("y_0", 7)


@pytest.mark.parametrize(
    ("name", "sizes", "place", "way_out"),
    [
        ("one_row", "batch = 1 ", "one row", "x:0=2..64"),
        ("printed", "batch = 10 ", "printed", "x:0=1..9"),
        ("typed", "batch = 37 ", "typed", "x:0=1..36"),
        ("squeezed", "batch = 1 ", "", "x:0=2..64"),
    ],
)
def test_sizes_that_leave_no_guard_are_found_and_refused(
    capsys: Capture, name: str, sizes: str, place: str, way_out: str
) -> None:
    done = export(capsys, name, "--fallback", "none", "--dynamic", "x:0=1..64")
    reported = " ".join(done.err.split())
    assert done.code == 2, reported
    assert f"with {sizes}" in reported
    assert way_out in reported
    assert not place or line(place) in reported


def test_what_is_not_proved_for_all_sizes_is_checked_when_the_engine_is_fed(
    capsys: Capture,
) -> None:
    ranges = [f"--dynamic=x:{index}=1..2000" for index in range(3)]
    with engine_of(export(capsys, "product", "--fallback", "none", *ranges)) as engine:
        assert len(engine.manifest.size_checks) == 1
        x = np.ones((2, 991, 3), np.float32)
        np.testing.assert_array_equal(engine.run({"x": x})["output_0"], x + 1)
        with pytest.raises(InputError, match=r"expected sizes with .* != 988027, got batch = 1"):
            engine.run({"x": np.ones((1, 991, 997), np.float32)})


def test_pairs_of_sizes_in_default_ranges_are_checked_too(capsys: Capture) -> None:
    with engine_of(export(capsys, "ids", "--fallback", "none")) as engine:
        assert any("(batch*sequence) != 35" in note for note in engine.manifest.notes)
        with pytest.raises(InputError, match="got batch = 5, sequence = 7"):
            engine.run({"input_ids": np.ones((5, 7), np.int64)})
        assert engine.run({"input_ids": np.ones((5, 8), np.int64)})["output_0"].shape == (5, 8, 4)
