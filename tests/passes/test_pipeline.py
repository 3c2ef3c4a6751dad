"""Pipelines: their order, the checks after every pass, sites, errors that name the pass."""

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.errors import PassDefectError, PassError, SpecError
from enginecast.passes import registry
from enginecast.passes.ir.base import Pass, PassContext, Site, SiteKey
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.sites import SKIPPED, SiteLog
from enginecast.passes.registry import build

aten = torch.ops.aten


class Half(nn.Module):
    """Two casts on one line, so that two sites share module and source."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().float().relu().float()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = Half()
        self.right = Half()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.right(self.left(x))
        return out


@dataclass(frozen=True)
class DropCast(Pass):
    """Drop casts to fp32, the last of which is the program's output."""

    name: ClassVar[str] = "drop-cast"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(program.graph.nodes):
            if node.target is not aten.to.dtype or log.skipped(node):
                continue
            for user in list(node.users):
                if user.target is aten._assert_tensor_metadata.default:
                    program.graph.erase_node(user)
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
            log.done(node, "nothing changes")
        return log.sites


@dataclass(frozen=True)
class Late(Pass):
    """Goes after drop-cast; does nothing, and reports sites without a log."""

    name: ClassVar[str] = "late"
    after: ClassVar[frozenset[str]] = frozenset({"drop-cast"})
    size: int = 0

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        return [Site("a", "m", "f.py:1"), Site("b", "m", "f.py:1"), Site("c", "m", "f.py:2", "no")]


@dataclass(frozen=True)
class Tangle(Pass):
    """Leaves a graph in which a node is used before it is made."""

    name: ClassVar[str] = "tangle"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        relus = [node for node in program.graph.nodes if node.target is aten.relu.default]
        relus[0].args = (relus[1],)
        return []


@dataclass(frozen=True)
class Decline(Pass):
    """Does not apply to any program."""

    name: ClassVar[str] = "decline"

    def requires(self, program: ExportedProgram) -> None:
        raise PassError("the program has no convolution", hint="Leave the pass out.")

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        raise AssertionError("ran although it does not apply")


@dataclass(frozen=True)
class Crash(Pass):
    """Has a bug."""

    name: ClassVar[str] = "crash"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        sites: dict[str, Site] = {}
        return [sites["missing"]]


CLASSES: dict[str, type[Pass]] = {cls.name: cls for cls in (DropCast, Late, Tangle, Decline, Crash)}


@pytest.fixture
def local_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `build` find the passes of this file and no others."""

    def find(name: str) -> type[Pass]:
        if name not in CLASSES:
            raise SpecError(f"unknown pass '{name}'", hint="Known: those here.")
        return CLASSES[name]

    monkeypatch.setattr(registry, "pass_class", find)


@pytest.fixture
def program() -> ExportedProgram:
    return torch.export.export(Pair().eval(), (torch.randn(2, 3),))


def casts(program: ExportedProgram) -> int:
    return sum(node.target is aten.to.dtype for node in program.graph.nodes)


@pytest.mark.usefixtures("local_passes")
def test_wrong_order_is_refused_and_names_both() -> None:
    with pytest.raises(SpecError) as caught:
        build("late{size=1},drop-cast")
    first, _, caret = caught.value.message.split("\n")
    assert first == "pass 'late' must come after 'drop-cast'"
    assert caret == "  ^"
    assert "drop-cast" in caught.value.hint


def test_skip_set_of_an_earlier_run_hits_the_same_sites() -> None:
    def once(skip: frozenset[SiteKey]) -> tuple[int, tuple[Site, ...]]:
        program = torch.export.export(Pair().eval(), (torch.randn(2, 3),))
        (run,) = run_pipeline([DropCast()], program, PassContext(skip=skip))
        return casts(program), run.sites

    _, first = once(frozenset())
    left, second = once(frozenset({first[1].key, first[2].key}))
    assert left == 2
    assert [site.key for site in second] == [site.key for site in first]
    assert [site.reason for site in second] == ["", SKIPPED, SKIPPED, ""]


def test_program_that_does_not_lint_names_the_pass(program: ExportedProgram) -> None:
    with pytest.raises(PassError) as caught:
        run_pipeline([DropCast(), Late(), Tangle()], program, PassContext())
    assert caught.value.message.startswith("pass 'tangle' (after drop-cast, late): ")
    assert "before it" in caught.value.message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_bug_in_a_pass_names_the_pass_and_its_error(program: ExportedProgram) -> None:
    place = r"^pass 'crash': KeyError: 'missing' at \S*test_pipeline\.py:\d+$"
    with pytest.raises(PassDefectError) as caught:
        run_pipeline([Crash()], program, PassContext())
    assert re.match(place, caught.value.message)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.exit_code == 70
    assert "not of enginecast" in caught.value.hint
    assert 'sites["missing"]' in caught.value.trace


@dataclass(frozen=True)
class Scale(Pass):
    """Scale every weight where it lies."""

    name: ClassVar[str] = "scale-in-place"
    hides: bool = False

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        for tensor in program.state_dict.values():
            with torch.no_grad():
                (tensor.data if self.hides else tensor).mul_(1.5)
        return []


@pytest.mark.parametrize("hides", [False, True])
def test_a_pass_that_writes_to_a_weight_is_refused(hides: bool) -> None:
    """The program that it is compared with has the same tensor, and would agree."""
    program = torch.export.export(nn.Linear(64, 64).eval(), (torch.randn(2, 64),))
    with pytest.raises(PassError, match=r"'scale-in-place': it writes to the weight 'weight'"):
        run_pipeline([Scale(hides)], program, PassContext())
