"""The passes of an export, each compared with eager as it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.export import ExportedProgram

from enginecast.capture.examples import Case
from enginecast.passes.base import Pass, Site
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.pipeline import PassRun, run_pipeline
from enginecast.passes.rescale_residual import RescaleResidual
from enginecast.prepare import Prepared
from enginecast.steps import Steps
from enginecast.verify.culprit import Bisection, Culprit, Leave
from enginecast.verify.emulate_profiles import Profile, profile_for
from enginecast.verify.emulation_data import Emulation, overflow_sentence
from enginecast.verify.floor import range_culprit
from enginecast.verify.program import Observer, TrueDtypeRun, true_dtype_check
from enginecast.verify.quantized_floor import PlannedFloor
from enginecast.verify.reference import Reference
from enginecast.verify.report_data import PassCheck

OBSERVED = 2
"""Cases that are run after every pass; more take longer and find little more."""


@dataclass(frozen=True)
class Rewritten:
    """A program after its passes, and what was found on the way."""

    program: ExportedProgram
    runs: tuple[PassRun, ...]
    checks: tuple[PassCheck, ...]
    emulated: TrueDtypeRun | None
    """The program in the target's fp16 or bf16 arithmetic; None for fp32."""
    reference: Reference
    """What it is judged by: that of the model, the floor widened by what a plan rounds."""
    cause: str = ""
    """Where values leave fp16's range, when that is what broke; empty when it is not."""
    bisection: Bisection | None = None
    """What does harm, when it is wrong and that was looked for."""
    dropped: tuple[Culprit, ...] = ()
    """Whose sites were left out after they had been found to do harm."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Why this program must not be lowered, the cause first.

        What comes after the first broken promise is mostly its consequence, so that one is told.
        """
        broken = [check.failure for check in self.checks if check.failure]
        if not broken:
            return ()
        later = f"; then {len(broken) - 1} later passes, too" if len(broken) > 1 else ""
        return (*self._cause(), f"pass {broken[0]}{later}", *self.blame)

    @property
    def problems(self) -> tuple[str, ...]:
        """What the run in the true dtype found."""
        found = self.emulated.problems if self.emulated is not None else ()
        return (*(self._cause() if found and self.cause else found), *self.blame)

    @property
    def blame(self) -> tuple[str, ...]:
        """The culprits in words, and what would help."""
        if self.bisection is None:
            return ()
        hint = self.bisection.hint()
        return (*self.bisection.lines(), *([hint] if hint else ()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, and why."""
        return tuple(
            f"dropped {len(culprit.left_out)} of {culprit.rewritten} sites: {line}"
            for culprit in self.dropped
            for line in culprit.lines()
        )

    @property
    def emulation(self) -> Emulation | None:
        """What that run found, module by module."""
        return self.emulated.emulation if self.emulated is not None else None

    def _cause(self) -> tuple[str, ...]:
        if not self.cause:
            return ()
        return (
            f"fp16 cannot hold this model: {self.cause};"
            " --precision bf16 and fp32 have the range for it",
        )

    def sites(self) -> dict[str, list[Site]]:
        """Sites by pass name."""
        found: dict[str, list[Site]] = {}
        for run in self.runs:
            found.setdefault(run.pass_.name, []).extend(run.sites)
        return found


def rewrite(
    prepared: Prepared,
    passes: tuple[Pass, ...],
    reference: Reference,
    steps: Steps,
    leave: Leave = (),
    target: str = "onnxruntime",
) -> Rewritten:
    """Run the passes on a copy of the captured program.

    A pass that breaks its promise does not stop the others: the report should hold them all.

    Args:
        leave: sites that each pass leaves alone; empty: none.
        target: of the export: low precision is judged as its kernels compute.
    """
    planned, observer = observe(prepared, passes, reference)
    program = structural_copy(prepared.captured.program)
    with steps("passes"):
        runs = run_pipeline(passes, program, prepared.context, (planned, observer), leave)
    reference = replace(reference, floor=planned.floor)
    for run in runs:
        left = len(run.sites) - run.rewritten
        steps.log(
            f"pass {run.pass_.name}: {run.rewritten} rewritten, {left} left alone,"
            f" {run.seconds:.3f} s"
        )
    emulated = None
    if reference.floor.dtype != "fp32":
        with steps(f"emulate {reference.floor.dtype}"):
            emulated = _emulate(prepared, program, reference, profile_for(target))
    broken = any(check.failure for check in observer.checks)
    cause = ""
    if reference.floor.dtype == "fp16" and (broken or (emulated and emulated.problems)):
        cause = _range_cause(prepared, passes, runs, emulated)
    return Rewritten(program, tuple(runs), tuple(observer.checks), emulated, reference, cause)


def judged_for(prepared: Prepared, rewritten: Rewritten, made_for: str, target: str) -> Rewritten:
    """The same program, judged in the arithmetic of another target.

    Args:
        made_for: the target whose arithmetic it was judged in.
    """
    if rewritten.emulated is None or profile_for(made_for) == profile_for(target):
        return rewritten
    program, reference = rewritten.program, rewritten.reference
    emulated = _emulate(prepared, program, reference, profile_for(target))
    return replace(rewritten, emulated=emulated)


def observed_cases(prepared: Prepared) -> tuple[Case, ...]:
    """The cases that are run after every pass: together they take every way that any case takes."""
    return prepared.watched or prepared.cases[:OBSERVED]


def observe(
    prepared: Prepared, passes: Sequence[Pass], reference: Reference
) -> tuple[PlannedFloor, Observer]:
    """What looks at the program after each pass, in this order: what a plan costs, and what
    compares.
    """
    observed, program = observed_cases(prepared), prepared.captured.program
    observer = Observer(
        program,
        observed,
        names=prepared.output_names,
        floor=reference.floor.only(frozenset(case.name for case in observed)),
        mask_input=prepared.mask_input,
        masked=reference.masked,
    )
    names = prepared.output_names
    planned = PlannedFloor(passes, program, prepared.cases, reference, observer, names)
    return planned, observer


def _range_cause(
    prepared: Prepared,
    passes: tuple[Pass, ...],
    runs: Sequence[PassRun],
    emulated: TrueDtypeRun | None,
) -> str:
    """Where values leave fp16's range, and what rescale-residual did about it."""
    cause = _place(prepared, passes, emulated)
    rescaling = [run for run in runs if run.pass_.name == RescaleResidual.name]
    if cause and not rescaling:
        return f"{cause}, and the pipeline has no {RescaleResidual.name}"
    left = [site for run in rescaling for site in run.sites if site.reason]
    if not cause or not left:
        return cause
    place = left[0].module or "the model itself"
    return f"{cause} ({RescaleResidual.name} left {place}: {left[0].reason})"


def _place(prepared: Prepared, passes: tuple[Pass, ...], emulated: TrueDtypeRun | None) -> str:
    """Where values overflow, or else what a module hands on once rescale-residual has done what it
    can.
    """
    overflow = emulated.emulation.overflow if emulated is not None else None
    if overflow is not None and overflow.largest > overflow.max_finite:
        return overflow_sentence(overflow)
    program = structural_copy(prepared.captured.program)
    rescaling = [pass_ for pass_ in passes if pass_.name == RescaleResidual.name]
    run_pipeline(rescaling, program, prepared.context)
    return range_culprit(program, prepared.cases)


def _emulate(
    prepared: Prepared, program: ExportedProgram, reference: Reference, profile: Profile
) -> TrueDtypeRun:
    """Judge low precision as a GPU computes it: the CPU provider computes it in fp32."""
    return true_dtype_check(
        program,
        prepared.cases,
        {case.name: case.reference for case in reference.cases},
        floor=reference.floor,
        profile=profile,
        names=prepared.output_names,
        mask_input=prepared.mask_input,
        masked=reference.masked,
    )
