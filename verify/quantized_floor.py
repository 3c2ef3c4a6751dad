"""The noise floor of a quantised engine: eager's, and the error of its plan.

The plan is simulated on the program as it stands before it is rewritten, by code that shares
nothing with the rewriting.  A wrong scale in the rewritten program is therefore no part of the
floor, and shows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.export import ExportedProgram

from enginecast.passes.base import Pass
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.pipeline import PassRun
from enginecast.passes.quantization_plan import QuantizationPlan, plan_of
from enginecast.passes.simulate_quantization import simulate
from enginecast.verify.comparison import Comparison, Floor, compare
from enginecast.verify.floor import Case
from enginecast.verify.metrics import Metrics
from enginecast.verify.program import Observer, mask_of
from enginecast.verify.promise import as_array
from enginecast.verify.reference import Reference
from enginecast.verify.verdict import floor_failures

REWRITES = frozenset({"fp8-matmul", "int8-matmul"})
"""Passes that carry a plan out."""


class PlannedFloor:
    """Widens the floor when a pass carries out a plan; hand it to `run_pipeline` before `observer`.

    Args:
        passes: of the pipeline, in order.
        program: as captured.
        cases: the verification inputs.
        reference: of those cases, with eager's floor.
        observer: judges that pass, and those after it, by the wider floor.
        names: of the outputs.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        program: ExportedProgram,
        cases: Sequence[Case],
        reference: Reference,
        observer: Observer,
        names: Sequence[str],
    ) -> None:
        self.floor = reference.floor
        self._next = [pass_.name for pass_ in passes[1:]]
        self._cases = cases
        self._reference = reference
        self._observer = observer
        self._names = names
        first = bool(passes) and passes[0].name in REWRITES
        self._before = structural_copy(program) if first else None

    def __call__(self, pass_: Pass, program: ExportedProgram, run: PassRun) -> None:
        before, self._before = self._before, None
        plan = plan_of(program)
        # Where eager itself is no measure, that is what has to be told.
        if before is not None and plan is not None and not any(floor_failures(self.floor)):
            self.floor = planned_floor(
                self.floor, before, plan, self._cases, self._reference, self._names
            )
            own = frozenset(case.name for case in self._observer.cases)
            rules = replace(self._observer.rules, floor=self.floor.only(own))
            self._observer.rules = rules
        following = self._next.pop(0) if self._next else ""
        if following in REWRITES:
            self._before = structural_copy(program)


def planned_floor(
    floor: Floor,
    program: ExportedProgram,
    plan: QuantizationPlan,
    cases: Sequence[Case],
    reference: Reference,
    names: Sequence[str],
) -> Floor:
    """The floor with the error that a plan makes.

    Args:
        floor: eager's, of all cases.
        program: right before it is rewritten.
        plan: that will be carried out.
        cases: the verification inputs, tensors.
        reference: the fp64 outputs of the same cases.
        names: of the outputs.
    """
    wanted = {case.name: case.reference for case in reference.cases}
    outputs = simulate(program, plan, [case.inputs for case in cases], names, reference.mask_input)
    measured: Comparison = {
        case.name: compare(
            {name: as_array(tensor) for name, tensor in found.items()},
            wanted[case.name],
            attention_mask=None
            if (mask := mask_of(case, reference.mask_input)) is None
            else as_array(mask),
            masked=reference.masked,
        )
        for case, found in zip(cases, outputs, strict=True)
    }
    return replace(
        floor,
        cases=_added(floor.cases, measured),
        rounding=plan.format,
        max_error=plan.max_error,
    )


def _added(
    own: Mapping[str, Mapping[str, Metrics]], planned: Mapping[str, Mapping[str, Metrics]]
) -> Comparison:
    return {
        case: {name: _sum(found, planned[case][name]) for name, found in outputs.items()}
        for case, outputs in own.items()
    }


def _sum(own: Metrics, planned: Metrics) -> Metrics:
    """Two errors that know nothing of each other; cosines fall by the squares of errors."""
    pads = [found.pad_error for found in (own, planned) if found.pad_error is not None]
    return replace(
        own,
        error_norm=math.hypot(own.error_norm, planned.error_norm),
        worst_row=math.hypot(own.worst_row, planned.worst_row),
        max_abs=own.max_abs + planned.max_abs,
        cosine=max(own.cosine + planned.cosine - 1.0, -1.0),
        pad_error=math.hypot(*pads) if pads else None,
        nonfinite=own.nonfinite + planned.nonfinite,
    )
