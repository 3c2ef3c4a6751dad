"""Data-dependent Python control flow becomes structured, and stays the same function."""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import branching
import onnx_ir
import onnxruntime
import pytest
import torch
from branching import REFUSED, WORKING
from control_flow import BRANCHES, MARK, ROWS
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.capture.control_flow.converters.restructure import Restructured, restructure
from enginecast.capture.control_flow.operators.sites import RewriteRefused
from enginecast.exporters.onnx.convert import convert
from enginecast.exporters.onnx.lower import OPSET

QUICK = ("IfElse", "Ternary", "WhileNorm", "AppendStack")
"""Cases that go through ONNX Runtime each time; the conversion takes most of the time."""
STRUCTURED = ("torch.cond", "while_loop", "scan", "torch.where", "_assert_async")


@dataclass(frozen=True)
class Case:
    """A module with inputs that take different paths."""

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Mapping[str, Tensor], ...]


def x(rows: int, scale: float, shift: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.rand(rows, branching.SIZE, generator=generator) * scale + shift}


INPUTS = (x(3, 1, 0.1), x(3, 1, -2), x(7, 20, -10), x(4, 0.1, 0), x(6, 0.1, -0.2), x(2, 2, -1))
NAMED = {row.name: row for row in ROWS}
ALSO = [NAMED["AssertValue"], NAMED["IfShape"]]
NO_ROUNDS = {**x(3, 1, 0), "n": torch.tensor(0)}
CASES = [
    *(Case(row.name, row.make, (row.a(), row.b())) for row in (*BRANCHES, *ALSO)),
    Case("NoRounds", NAMED["ForRangeTensor"].make, (NAMED["ForRangeTensor"].a(), NO_ROUNDS)),
    *(Case(module.__name__, module, INPUTS) for module in WORKING),
]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def run(module: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return tensors(module(**{name: tensor.clone() for name, tensor in inputs.items()}))


def exported(
    module: nn.Module, rewritten: Restructured, inputs: Mapping[str, Tensor]
) -> ExportedProgram:
    """With the rows of x dynamic."""
    shapes: dict[str, Any] = {name: {} for name in inputs}
    shapes["x"] = {0: Dim("rows", min=2, max=64)}
    with rewritten.active(), torch.no_grad():
        return torch.export.export(module, (), dict(inputs), dynamic_shapes=shapes, strict=False)


def program_of(case: Case) -> ExportedProgram:
    module = seeded(case.make)
    rewritten = restructure(module)
    made = exported(module, rewritten, case.inputs[0])
    became = {site.became for site in rewritten.sites}
    assert became & set(STRUCTURED), "nothing was rewritten: the test shows nothing"
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rewritten_code_computes_the_same_in_eager(case: Case) -> None:
    module = seeded(case.make)
    rewritten = restructure(module)
    codes = {function: function.__code__ for function in rewritten.functions}
    assert codes
    for inputs in case.inputs:
        expected = run(copy.deepcopy(module), inputs)
        with rewritten.active():
            found = run(copy.deepcopy(module), inputs)
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert all(function.__code__ is code for function, code in codes.items())


@pytest.mark.parametrize("case", CASES[::2])
def test_program_computes_the_same_whichever_path_it_takes(case: Case) -> None:
    module, program = seeded(case.make), program_of(case)
    for inputs in case.inputs:
        for one, other in zip(run(module, inputs), run(program.module(), inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "case",
    CASES[::9],
    ids=lambda case: case.name,
)
def test_onnx_runtime_computes_the_same_whichever_path_it_takes(case: Case) -> None:
    module = seeded(case.make)
    model = onnx_ir.to_proto(convert(program_of(case), opset=OPSET, reader="onnxruntime-cpu"))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for inputs in case.inputs:
        fed = {name: tensor.numpy() for name, tensor in inputs.items()}
        found = [torch.from_numpy(array) for array in session.run(None, fed)]
        for one, other in zip(run(module, inputs), found, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_cannot_be_rewritten_is_refused_at_its_line(make: type[branching.Counts]) -> None:
    module = seeded(make)
    state = copy.deepcopy(vars(module))
    rewritten = restructure(module)
    codes = {function: function.__code__ for function in rewritten.functions}
    with pytest.raises(RewriteRefused, match=REFUSED[make]) as error:
        exported(module, rewritten, x(3, 1, -2))
    assert all(function.__code__ is code for function, code in codes.items())
    for name in ("calls", "seen", "options"):
        assert vars(module)[name] == state[name], "the model was changed"
    [(file, line)] = re.findall(r"^(\S+):(\d+): this", error.value.message)
    source = (file, int(line))
    [site] = [site for site in rewritten.sites if site.reason]
    assert (site.file, site.line) == source
    text = Path(file).read_text(encoding="utf-8").splitlines()
    assert MARK in text[int(line) - 1] or MARK in text[int(line)]


def test_an_assertion_fails_at_run_time_as_in_eager() -> None:
    module = branching.RaiseOnValue()
    program = exported(module, restructure(module), x(3, 1, 0))
    with pytest.raises(RuntimeError, match=r"if not x.max\(\) < 100"):
        program.module()(x=torch.full((2, 4), 200.0))
