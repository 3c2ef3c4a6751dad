"""The recorder sees each read of a tensor's value, and knows on what the value depends."""

import pytest
import torch
from control_flow import ROWS, Row
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.recorder import Recorder, decide, record
from enginecast.errors import CaptureError

READS = {
    "IfElse": {"bool"},
    "EarlyReturn": {"bool"},
    "IfWithoutElse": {"bool"},
    "InfClamp": {"bool"},
    "WhileNorm": {"bool"},
    "EarlyExit": {"bool"},
    "AssertValue": {"bool"},
    "Ternary": {"item"},
    "SliceByItem": {"item"},
    "PrintItem": {"item"},
    "ForRangeTensor": {"int"},
    "TryValue": {"int"},
    "ToList": {"tolist"},
    "NumpyHop": {"numpy"},
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_reads_stand_where_they_are_written(row: Row) -> None:
    runs = record(row.module(), [row.a(), row.b()])
    reads = [read for run in runs for read in run]
    assert {read.kind for read in reads} == READS.get(row.name, set())
    assert {read.line for read in reads} <= {row.line}
    assert {read.decides for read in reads} <= {"inputs"}


def test_both_values_are_seen() -> None:
    row = next(row for row in ROWS if row.name == "IfElse")
    [[first], [second]] = record(row.module(), [row.a(), row.b()])
    assert (first.value, second.value) == (True, False)
    assert "if x.sum() > 0:" in first.code
    assert first.function == "IfElse.forward"


class Buffers(nn.Module):
    """Predicates on a buffer: as it is, cut to a size, and beside values made from sizes."""

    flags: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        if self.flags[1] > 0:
            x = x + 1
        if self.flags[: x.shape[0]].sum() > 3:
            x = x + 2
        if torch.arange(x.shape[0]).max() > 4:
            x = x + 3
        if torch.arange(8).max() > 4:
            x = x + 4
        seen = torch.zeros(2)
        seen[0] = x.sum()  # what is written in place counts, too
        if seen.max() > 0:
            x = x + 5
        return x


def test_weights_sizes_and_inputs_are_distinguished() -> None:
    runs = record(Buffers(), [{"x": torch.ones(3)}, {"x": torch.ones(7)}])
    expected = ["weights", "shapes", "shapes", "weights", "inputs"]
    assert [read.decides for read in runs[0]] == expected
    assert [read.decides for read in runs[1]] == expected


def test_one_run_cannot_tell_sizes_from_weights() -> None:
    [reads] = record(Buffers(), [{"x": torch.ones(3)}])
    assert [read.decides for read in reads[:3]] == ["weights"] * 3
    assert decide([reads])[0] == reads


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Buffers()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def test_the_module_is_named() -> None:
    module = Outer()
    with Recorder(module, {}) as seen:
        module(x=torch.ones(3))
    assert {read.module for read in seen.reads} == {"inner"}


class Endless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.sum() > -1:
            x = x * 0.5
        return x


def test_a_loop_without_end_is_named() -> None:
    with (
        pytest.raises(
            CaptureError, match=r"(?s)test_recorder.py:\d+.*while x.sum\(\) > -1.*10,000"
        ),
        Recorder(Endless(), {}) as seen,
    ):
        Endless()(torch.ones(3))
    assert len(seen.reads) == 10_000


class Conditional(nn.Module):
    """torch.cond compiles itself in eager, and cannot under a dispatch mode."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return made


def test_a_run_that_fails_under_the_recorder_does_not_spoil_the_next() -> None:
    x = torch.ones(3)
    record(Conditional(), [{"x": x}])
    torch.testing.assert_close(Conditional()(x), x.sin())


class Compares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(3)
        return x * 2 if torch.allclose(zeros, x) or torch.equal(zeros, x) else x


def test_comparisons_of_whole_tensors_are_reads_of_either() -> None:
    [reads] = record(Compares(), [{"x": torch.ones(3)}])
    assert [(read.kind, read.value, read.decides) for read in reads] == [
        ("compare", False, "inputs")
    ] * 2


def test_an_array_is_kept_as_it_was_and_raises_when_a_trace_writes_to_it() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.zeros(4)
            table.numpy()[:] = 3.0
            return x + table

    [[read]] = record(Writes(), [{"x": torch.ones(4)}])
    assert read.value.tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="read-only"):
        read.value[:] = 3.0
