"""The recorder sees each read of a tensor's value, and knows on what the value depends."""

import pytest
import torch
from control_flow import ROWS, Row
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.recorder import record

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


class Conditional(nn.Module):
    """torch.cond compiles itself in eager, and cannot under a dispatch mode."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return made


def test_a_run_that_fails_under_the_recorder_does_not_spoil_the_next() -> None:
    x = torch.ones(3)
    record(Conditional(), [{"x": x}])
    torch.testing.assert_close(Conditional()(x), x.sin())
