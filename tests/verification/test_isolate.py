"""Modules run on the values from before a pass: what they hand on is not blamed on them."""

from collections.abc import Callable

import torch
from bisections import deep_program
from harmful_passes import scale
from program_edits import find
from small_programs import NAMES, cases
from torch.export import ExportedProgram

from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.unify_dtype import UnifyDtype
from enginecast.verification.boundaries import Snapshot, isolated, snapshots

aten = torch.ops.aten
INPUTS = [case.inputs for case in cases()]


def edited(edit: Callable[[ExportedProgram], object]) -> ExportedProgram:
    copy = structural_copy(deep_program())
    edit(copy)
    copy.graph_module.recompile()
    return copy


def changed(before: list[Snapshot], after: list[Snapshot]) -> set[str]:
    """Modules whose result has other bits, in any case."""
    return {
        module
        for old, new in zip(before, after, strict=True)
        for module in old.boundaries
        if old.boundaries[module][-1].digest != new.boundaries[module][-1].digest
    }


def test_only_the_module_that_was_changed_differs() -> None:
    after = edited(
        lambda p: scale(find(p, aten.linear.default, "blocks.2.first"), 1.5),
    )
    before = snapshots(deep_program(), INPUTS, names=NAMES)
    assert len(changed(before, snapshots(after, INPUTS, names=NAMES))) > 10
    apart = isolated(deep_program(), after, INPUTS, names=NAMES)
    assert changed(before, apart) == {"blocks.2.first"}


def test_values_are_fed_in_the_dtype_that_the_program_wants() -> None:
    low = edited(lambda p: run_pipeline((UnifyDtype(to="fp16"),), p, PassContext()))
    apart = isolated(deep_program(), low, INPUTS, names=NAMES)
    boundary = apart[0].boundaries["blocks.5.second"][-1]
    assert boundary.dtype is torch.float16
    wanted = snapshots(deep_program(), INPUTS, names=NAMES)[0].boundaries["blocks.5.second"][-1]
    error = (boundary.sample - wanted.sample).norm() / wanted.sample.norm()
    assert 0 < error < 2 * 2.0**-11  # its own rounding and that of its inputs
