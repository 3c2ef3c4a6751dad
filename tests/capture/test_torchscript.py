"""Script the smallest submodule that branches, trace the rest: in `capture` and `exporters`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from control_flow import BRANCHES, ROWS, Row
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.recorder import record
from enginecast.capture.python.locations import SourceLocation
from enginecast.capture.refusals.explain import Refusal
from enginecast.capture.sources.factory import take_module
from enginecast.capture.torchscript.questions import questions
from enginecast.capture.torchscript.script import UnscriptableError, hybrid
from enginecast.capture.tracing.attempt import RefusedError
from enginecast.compiler.export.session import ExportSession
from enginecast.compiler.request import ExportRequest
from enginecast.compiler.steps import Steps
from enginecast.errors import CaptureError, LoweringError

BY_NAME = {row.name: row for row in ROWS}
SCRIPTABLE = (
    "IfElse",
    "EarlyReturn",
    "IfWithoutElse",
    "Ternary",
    "InfClamp",
    "WhileNorm",
    "ForRangeTensor",
    "MoeLoop",
)


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: Callable[[Tensor], Tensor] = nn.Linear(6, 6)
        self.second: Callable[[Tensor], Tensor] = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.first(x)
        return self.second(x) * 2


LEAF = SourceLocation(__file__, Leaf.forward.__code__.co_firstlineno + 1)


class Outer(nn.Module):
    """TorchScript refuses its **kwargs, and a trace its dict were it not flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, **_: object) -> dict[str, Tensor]:
        hidden = self.leaf(x)
        return {"narrow": self.last(hidden), "hidden": hidden}


def outer() -> Outer:
    torch.manual_seed(0)
    return Outer().eval().requires_grad_(False)


def both_paths(width: int = 6) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    x = torch.rand(3, width)
    return {"x": x}, {"x": -torch.rand(5, width)}


def place_of(row: Row) -> SourceLocation:
    return SourceLocation(row.file, row.line)


def eager(module: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found = copy.deepcopy(module)(**inputs)
    assert isinstance(found, Tensor)
    return found


def test_only_the_branching_leaf_is_scripted_and_both_paths_are_right() -> None:
    module = outer()
    found = hybrid(module, both_paths()[0], [LEAF])
    assert found.scripted == ("leaf",)
    assert found.outputs == ("narrow", "hidden")
    assert found.inputs == ("x",)
    assert found.suspects == ()
    for inputs in both_paths():
        wanted = module(**inputs)
        narrow, hidden = found.module(inputs["x"])
        torch.testing.assert_close(narrow, wanted["narrow"], rtol=0, atol=0)
        torch.testing.assert_close(hidden, wanted["hidden"], rtol=0, atol=0)


@pytest.mark.parametrize("name", SCRIPTABLE)
def test_modules_with_control_flow_are_right_on_both_inputs(name: str) -> None:
    row = BY_NAME[name]
    module = row.module()
    found = hybrid(module, row.a(), [place_of(row)])
    assert found.scripted == ("",)
    for inputs in (row.a(), row.b()):
        (got,) = found.module(*inputs.values())
        torch.testing.assert_close(got, eager(module, inputs), rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted({row.name for row in BRANCHES} - {*SCRIPTABLE}))
def test_what_cannot_be_scripted_is_refused_with_module_line_and_reason(name: str) -> None:
    row = BY_NAME[name]
    with pytest.raises(UnscriptableError) as refused:
        hybrid(row.module(), row.a(), [place_of(row)])
    assert f"({name})" in refused.value.message
    assert f"{row.file}:{row.line}" in refused.value.message


@pytest.mark.parametrize("name", ["BufferCounter", "KvCache"])
def test_a_model_that_keeps_state_is_refused(name: str) -> None:
    row = BY_NAME[name]
    with pytest.raises(CaptureError, match="writes into the buffer"):
        hybrid(row.module(), row.a())


def test_what_torchscript_cannot_store_is_refused_at_the_line_of_the_branch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal = Refusal(
        kind="data-dependent-branch",
        file="model.py",
        line=7,
        code="if x.sum() > 0:",
        reason="a branch on values",
        hint="",
        detail="",
    )

    def unstorable(*_: object) -> NoReturn:
        raise LoweringError("TorchScript cannot store the model: strides() of nothing")

    def refuse(*_: object) -> NoReturn:
        raise RefusedError(refusal)

    monkeypatch.setattr(ExportSession, "_of_script", unstorable)
    monkeypatch.setattr("enginecast.compiler.export.session.prepare", refuse)
    request, source = ExportRequest("model"), take_module(nn.Linear(2, 2), {})
    session = ExportSession(request, request.resolve(), source, None, Steps())  # type: ignore[arg-type]
    with pytest.raises(CaptureError) as caught:
        session.candidate()
    assert "model.py:7" in caught.value.message
    assert "TorchScript does not help: TorchScript cannot store" in caught.value.message


def places_of(module: nn.Module, example: dict[str, Tensor]) -> set[SourceLocation]:
    return {read.place for run in record(module.eval(), [example]) for read in run}


class Resized(nn.Module):
    """In a trace torch itself computes this size from a factor in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        taken = x[:, None]
        return nn.functional.interpolate(taken, scale_factor=0.7, recompute_scale_factor=True)


class Helped(nn.Module):
    """Asks in a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return helped(x)


def helped(x: Tensor) -> Tensor:
    return x[:1] if torch.jit.is_scripting() else x[:1] * 1  # type: ignore[attr-defined]


def test_code_that_asks_whether_it_is_torchscript_is_named_where_it_runs() -> None:
    example = {"x": torch.ones(2, 40)}
    [resized] = questions(hybrid(Resized().eval(), example).module)
    assert Path(resized.file).name == "functional.py"
    [place] = places_of(Helped(), example)
    assert questions(hybrid(Helped().eval(), example, [place]).module) == (
        SourceLocation(__file__, helped.__code__.co_firstlineno + 1),
    )
    assert not questions(hybrid(Helped().eval(), example).module)  # a trace is not a script
