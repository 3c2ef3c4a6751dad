"""`enginecast.testing`: what a pass author asserts is able to fail."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from enginecast.passes.fuse_gelu import FuseGelu
from enginecast.passes.fuse_rms_norm import FuseRmsNorm
from enginecast.passes.ir.base import GraphPass, Pass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import aten
from enginecast.passes.ir.sites import SiteLog
from enginecast.testing import (
    Captured,
    Outcome,
    capture,
    check_golden,
    check_mutations,
    compare,
    mutants,
    run_passes,
    same_bits,
)


class Small(nn.Module):
    """A gelu that is written out, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = hidden * 0.5 * (1.0 + torch.erf(hidden * 0.7071067811865476))
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        found: Tensor = self.weight * (hidden * scale)
        return found


@pytest.fixture(scope="module")
def captured() -> Captured:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return capture(Small(), torch.randn(3, 8), dynamic={0: Dim("batch", min=1, max=8)})


@dataclass(frozen=True)
class Nudge(GraphPass):
    """Multiply by another number than the model does."""

    name: ClassVar[str] = "nudge"
    promise: ClassVar[Promise] = "exact"

    to: float = 0.5

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in program.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            if 0.5 in node.args:
                node.update_arg(1, self.to)
                log.done(node)
        return log.sites


@pytest.mark.parametrize("pass_", [FuseGelu(), FuseRmsNorm()])
def test_our_passes_keep_their_promise_and_every_fault_is_noticed(
    captured: Captured, pass_: Pass
) -> None:
    outcome = run_passes(captured, pass_)
    assert len(outcome.rewritten) == 1
    check = compare(outcome, [torch.randn(5, 8) * 4])
    assert (check.name, check.rewritten) == (pass_.name, 1)
    assert len(check_mutations(outcome).noticed) >= 2


@pytest.mark.parametrize("other", [0.0, torch.inf])
def test_what_is_not_a_number_is_equal_to_itself_alone(other: float) -> None:
    x = torch.tensor([1.0, torch.nan])

    def program(value: float) -> Any:
        return capture(lambda x: torch.where(x.isnan(), value, x), x).program

    assert same_bits(program(torch.nan), program(torch.nan), x)
    equal = other != other  # which NaN it is says nothing
    assert same_bits(program(torch.nan), program(other), x) == equal
    assert not same_bits(program(torch.inf), program(torch.finfo().max), x)


def test_a_broken_promise_fails(captured: Captured) -> None:
    compare(run_passes(captured, Nudge()))
    with pytest.raises(AssertionError, match=r"nudge.*bit-equal"):
        compare(run_passes(captured, Nudge(to=0.5000001)))


def test_a_comparison_that_cannot_fail_is_found_out(captured: Captured) -> None:
    outcome = run_passes(captured, FuseGelu())
    with pytest.raises(AssertionError, match=r"does not notice that gelu.*its result is off by 1%"):
        check_mutations(outcome, lambda found: None)


def test_mutants_distort_swap_and_change_numbers(captured: Captured) -> None:
    outcome = run_passes(captured, Nudge(to=0.25))
    faults = [mutant.fault for mutant in mutants(outcome)]
    assert any("off by" in fault for fault in faults)
    assert any("argument 1 is 0.26, not 0.25" in fault for fault in faults)

    @dataclass(frozen=True)
    class Subtract(Nudge):
        def run(self, program: ProgramView, context: PassContext) -> list[Site]:
            for node in program.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
                node.target = aten.sub.Tensor
            return []

    function = capture(lambda x, y: x * y, torch.randn(2, 3), torch.randn(2, 3))
    swapped = [mutant.fault for mutant in mutants(run_passes(function, Subtract()))]
    assert any("operands are swapped" in fault for fault in swapped)


def test_golden_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: Captured) -> None:
    outcome: Outcome = run_passes(captured, FuseGelu())
    file = tmp_path / "golden" / "gelu.diff"
    with pytest.raises(AssertionError, match="GOLDEN=accept"):
        check_golden(file, outcome.diff)
    monkeypatch.setenv("GOLDEN", "accept")
    check_golden(file, outcome.diff)
    monkeypatch.delenv("GOLDEN")
    check_golden(file, outcome.diff)
    assert ".py:" not in file.read_text("utf-8")
    with pytest.raises(AssertionError, match="differs"):
        check_golden(file, outcome.diff + "more\n")
