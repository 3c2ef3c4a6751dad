"""A contiguous stays where it cannot be decided what other strides do."""

import pytest
import torch
from programs import Function, captured, count, rewritten
from torch import Tensor

from enginecast.passes.analyses import strides


def test_what_cannot_be_decided_is_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def form(x: Tensor) -> Tensor:
        return torch.relu(x.transpose(1, 2).contiguous())

    program = captured(Function(form), torch.randn(2, 3, 5))
    assert count(rewritten(program, "canonicalize")[0], "contiguous") == 0

    def undecided(*_: object) -> None:
        raise RuntimeError("Could not guard on data-dependent expression u0 < 1")

    monkeypatch.setattr(strides, "evaluate_fake", undecided)
    assert count(rewritten(program, "canonicalize")[0], "contiguous") == 1
