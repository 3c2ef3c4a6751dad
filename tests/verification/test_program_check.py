"""Level 1: every promise is measured, and every way of breaking it is seen and located."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from program_edits import (
    WHERE,
    Edit,
    Exact,
    Reordered,
    change_epsilon,
    change_one_bit,
    drop_the_mask,
    find,
    low_reference,
    perturb_one_weight,
    scale_after,
    sum_in_another_order,
)
from small_programs import NAMES, cases, encoder, program
from torch import nn
from torch.export import ExportedProgram

from enginecast.passes.ir.base import Pass, PassContext
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.unify_dtype import UnifyDtype
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import true_dtype_check
from enginecast.verification.program.observer import Observer
from enginecast.verification.reference import Reference
from enginecast.verification.verdict import judge

aten = torch.ops.aten


def observe(
    passes: Sequence[Pass],
    *,
    module: nn.Module | None = None,
    reference: Reference | None = None,
) -> tuple[Observer, ExportedProgram]:
    exported = program(module or encoder())
    observer = Observer(exported, cases(), reference or low_reference("fp32"), names=NAMES)
    run_pipeline(passes, exported, PassContext(), [observer])
    return observer, exported


def failure_of(passes: Sequence[Pass], **options: Any) -> str:
    """The failure of the last pass; those before it keep their promises."""
    observer, _ = observe(passes, **options)
    assert [check.failure for check in observer.checks[:-1]] == [""] * (len(passes) - 1)
    return observer.checks[-1].failure


def test_an_exact_pass_that_changes_one_bit_fails_where_it_does() -> None:
    failure = failure_of([Exact(change_one_bit)])
    assert failure.startswith("'edit' promises 'exact', but at blocks.1.norm (small_programs.py:")
    assert "no longer bit-equal" in failure


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (change_epsilon, "blocks.0"),
        (perturb_one_weight, "blocks.1"),
        (drop_the_mask, "blocks.0"),
        (lambda p: scale_after(find(p, aten.linear.default, "blocks.1.first"), 1.0001), "blocks.1"),
    ],
)
def test_a_wrong_rewrite_is_found_in_its_module(edit: Edit, place: str) -> None:
    failure = failure_of([Reordered(edit)])
    assert failure.startswith(f"'edit' promises 'reordered', but at {place}")
    assert "x the floor" in failure


def test_only_the_guilty_pass_is_blamed() -> None:
    passes = [Reordered(), Reordered(change_epsilon), Reordered(), Exact()]
    observer, _ = observe(passes)
    assert [bool(check.failure) for check in observer.checks] == [False, True, False, False]
    assert observer.checks[1].seconds >= 0.0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_change_of_precision_is_judged_by_eager(dtype: Any) -> None:
    reference = low_reference(dtype)
    observer, exported = observe(
        [UnifyDtype(to=dtype), Reordered(sum_in_another_order)], reference=reference
    )
    assert [check.failure for check in observer.checks] == ["", ""]
    run = true_dtype_check(exported, cases(), reference, get_profile("torch-cpu"), names=NAMES)
    verdict = judge(
        run.measured, reference.floor, where=WHERE, engine_ran=False, problems=run.problems
    )
    assert verdict.outcome == "verified-by-emulation"


def test_a_wrong_pass_in_low_precision_fails() -> None:
    def negate(program: ExportedProgram) -> None:
        scale_after(find(program, aten.linear.default, "blocks.1.first"), -1.0)

    reference = low_reference("bf16")
    failure = failure_of([UnifyDtype(to="bf16"), Reordered(negate)], reference=reference)
    assert failure.startswith("'edit' promises 'reordered'")


def test_fp16_that_overflows_is_rejected_with_the_module() -> None:
    scale = 3e5
    reference = low_reference("fp16", scale=scale)
    assert reference.floor.culprit.startswith("values leave fp16's range at blocks.0 ")
    exported = program(encoder(scale=scale))
    run_pipeline([UnifyDtype(to="fp16")], exported, PassContext())
    run = true_dtype_check(exported, cases(), reference, get_profile("torch-cpu"), names=NAMES)
    assert "values leave fp16's range at blocks.0" in run.problems[0]
    verdict = judge(
        run.measured, reference.floor, where=WHERE, engine_ran=False, problems=run.problems
    )
    assert verdict.outcome == "rejected"
    failure = failure_of([UnifyDtype(to="fp16")], module=encoder(scale=scale), reference=reference)
    assert re.search(r"at blocks.0.norm .*not finite .values leave", failure)
