"""What a program gives for a case is computed once."""

import pytest
import torch
from programs import captured
from torch import nn

from enginecast.passes.ir.interpret import Run
from enginecast.verification.runs import Runs

A, B, C = ({"input": torch.full((2, 3), float(n))} for n in (1, 2, -3))


def test_watched_cases_are_run_once_and_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    results = Run.results

    def counting(self: Run) -> list[list[object]]:
        counted.append(len(self._own))
        return results(self)

    monkeypatch.setattr(Run, "results", counting)
    program = captured(nn.ReLU(), A["input"])
    runs = Runs(lambda: program, ["y"])
    runs.watch([A, B])
    [first] = runs.outputs([A])
    assert torch.equal(first["y"], A["input"])
    assert counted == [2]
    assert [float(found["y"][0, 0]) for found in runs.outputs([C, B, A])] == [0, 2, 1]
    assert counted == [2, 1]
    assert runs.snapshots([A])[0].outputs is first
    assert counted == [2, 1]
