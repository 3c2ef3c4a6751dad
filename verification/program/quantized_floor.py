"""The noise floor of a quantized engine: eager's error and the error of its plan.

The plan is simulated on the program before the rewrite, by code that shares nothing with the
rewriting passes. A wrong scale in the rewritten program is therefore not in the floor, and is
detected.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.export import ExportedProgram

from enginecast.passes.ir.base import Pass
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import PassRun
from enginecast.passes.ir.quantization_plan import QuantizationPlan, plan_of
from enginecast.passes.quantize.measure.simulate import simulate
from enginecast.verification.eager.other_kernels import with_losses
from enginecast.verification.eager.outputs import Case, as_arrays
from enginecast.verification.metrics import Metrics
from enginecast.verification.program.observer import Observer
from enginecast.verification.reference import Reference


class PlannedFloor:
    """Widens the floor when a pass carries out a plan; pass it to `run_pipeline` before `observer`.

    Args:
        reference: reference of the observer's cases, with eager's floor.
        observer: judges that pass, and those after it, by the wider floor.
        calibration: the inputs that static scales are made from.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        program: ExportedProgram,
        cases: Sequence[Case],
        reference: Reference,
        observer: Observer,
        names: Sequence[str],
        calibration: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self._next = [*passes[1:]]
        self._cases = cases
        self.reference = reference
        self._observer = observer
        self._names = names
        self._calibration = calibration
        first = bool(passes) and passes[0].carries_out_plan
        self._before = structural_copy(program) if first else None

    def __call__(self, pass_: Pass, program: ExportedProgram, run: PassRun) -> None:
        before, self._before = self._before, None
        plan = plan_of(program)
        # Where eager itself is not a measure, its defects are what the report has to say.
        if before is not None and plan is not None and not self.reference.floor.defects:
            self.reference = planned_reference(
                before, plan, self._cases, self.reference, self._names, self._calibration
            )
            self._observer.judge_by(self.reference)
        if self._next and self._next.pop(0).carries_out_plan:
            self._before = structural_copy(program)


def planned_reference(
    program: ExportedProgram,
    plan: QuantizationPlan,
    cases: Sequence[Case],
    reference: Reference,
    names: Sequence[str],
    calibration: Sequence[Mapping[str, Tensor]],
) -> Reference:
    """The reference with a plan's error included in its floor.

    Args:
        program: the program right before the rewrite.
        calibration: the inputs that static scales were made from.
    """
    if not plan.rounds:
        return reference
    inputs = [case.inputs for case in cases]
    found = simulate(program, plan, inputs, names, reference.mask_input, calibration)
    outputs = {case.name: as_arrays(each) for case, each in zip(cases, found, strict=True)}
    floor = dict(reference.floor.cases)
    for case in reference.cases:
        planned = reference.compare(case, outputs[case.name])
        floor[case.name] = {
            name: _sum(own, planned[name]) for name, own in floor[case.name].items()
        }
    wider = replace(reference.floor, cases=floor, rounding=plan.rounding, max_error=plan.max_error)
    return with_losses(replace(reference, floor=wider), outputs)


def _sum(own: Metrics, planned: Metrics) -> Metrics:
    """The sum of two independent errors; cosines decrease by the squares of errors."""
    pads = [found.pad_error for found in (own, planned) if found.pad_error is not None]
    return replace(
        own,
        error_norm=math.hypot(own.error_norm, planned.error_norm),
        worst_row=math.hypot(own.worst_row, planned.worst_row),
        max_abs=own.max_abs + planned.max_abs,
        cosine=max(own.cosine + planned.cosine - 1.0, -1.0),
        pad_error=math.hypot(*pads) if pads else None,
        nonfinite=own.nonfinite + planned.nonfinite,
        wrong=None if own.wrong is None else max(own.wrong, planned.wrong or 0),
    )
