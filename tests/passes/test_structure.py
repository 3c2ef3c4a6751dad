"""Passes, checks and emulation over programs that hold graphs within the graph."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from structured_models import MODELS, WIDTH
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import aten, dtype_of, structural_copy, weight_specs
from enginecast.passes.ir.interpret import interpret_cases
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.text import print_ir
from enginecast.passes.registry import build
from enginecast.passes.unify_dtype import UnifyDtype
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import emulate
from enginecast.verification.program.observer import Observer

_PREPARED: dict[str, Prepared] = {}


def prepared(name: str) -> Prepared:
    """A captured model; captured once for all tests."""
    if name not in _PREPARED:
        module, example = MODELS[name].make()
        source = open_source(module, example=example)
        _PREPARED[name] = prepare(source, ModelOptions(), Steps())
    return _PREPARED[name]


def copied(name: str) -> ExportedProgram:
    return structural_copy(prepared(name).captured.program)


def outputs(name: str, program: ExportedProgram) -> list[dict[str, torch.Tensor]]:
    ready = prepared(name)
    inputs = [case.inputs for case in ready.cases]
    return interpret_cases(program, inputs, names=ready.output_names)


def floats(program: ExportedProgram) -> Iterator[Node]:
    for node in all_nodes(program):
        if node.op in ("call_function", "placeholder") and dtype_of(node) is not None:
            yield node


@pytest.mark.parametrize("name", ["Branches", "Counted", "OwnLength"])
def test_interpreting_gives_what_eager_gives(name: str) -> None:
    ready = prepared(name)
    eager = ready.source.eager()
    for case, found in zip(ready.cases, outputs(name, copied(name)), strict=True):
        result = eager(**case.inputs)
        wanted = result if isinstance(result, dict) else {"output_0": result}
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Branches", "Counted"])
def test_every_float_of_the_reference_is_fp64(name: str) -> None:
    program = copied(name)
    run_pipeline((UnifyDtype(to="fp64"),), program, PassContext())
    weights = weight_specs(program)
    low = [
        node.name
        for node in floats(program)
        if dtype_of(node) in (torch.float32, torch.float16)
        and node.op == "call_function"
        and node.name not in weights
    ]
    assert low == []
    assert all(
        tensor.dtype == torch.float64
        for found in outputs(name, program)
        for tensor in found.values()
        if tensor.is_floating_point()
    )


class Large(nn.Module):
    """Leaves fp16's range in one branch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.cond(
            x.sum() > 0, lambda h: self.up(h) * 1e6 * 1e-6, lambda h: self.up(h), (x,)
        )
        return found


def test_emulation_sees_an_overflow_within_a_branch() -> None:
    torch.manual_seed(0)
    example = {"x": torch.randn(3, 5, WIDTH)}
    ready = prepare(open_source(Large(), example=example), ModelOptions(), Steps())
    program = structural_copy(ready.captured.program)
    run_pipeline((UnifyDtype(to="fp16"),), program, PassContext())
    x = torch.randn(2, 5, WIDTH).abs()
    profile = get_profile("ort-cuda")
    _, calm = emulate(program, {"calm": {"x": -x}}, profile)
    assert calm.overflow is None
    _, wild = emulate(program, {"wild": {"x": x}}, profile)
    assert wild.overflow is not None
    assert wild.overflow.case == "wild"


@dataclass(frozen=True)
class Shift(GraphPass):
    """Wrong on purpose: changes the sum of a branch."""

    name: ClassVar[str] = "shift"
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(program.graph.nodes):
            if node.target is aten.mul.Tensor and node.args[1] == 2.0 and not log.skipped(node):
                node.update_arg(1, 2.001)
                log.done(node)
        return log.sites


def test_a_wrong_rewrite_in_one_branch_is_found_and_named() -> None:
    ready, program = prepared("Unchanged"), copied("Unchanged")
    observer = Observer(program, ready.watched, names=ready.output_names)
    run_pipeline((Shift(),), program, PassContext(), (observer,))
    [check] = observer.checks
    assert "cond[false]" in check.failure
    assert "bit-equal" in check.failure


def test_canonicalize_folds_and_merges_within_blocks() -> None:
    program = copied("Attends")
    wanted = outputs("Attends", program)
    run_pipeline(build("canonicalize"), program, PassContext())
    text = print_ir(program)
    assert 'constant "folded' in text  # made in the branch, and handed in
    for found, expected in zip(outputs("Attends", program), wanted, strict=True):
        assert torch.equal(found["output_0"], expected["output_0"])
