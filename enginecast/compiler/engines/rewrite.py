"""Run the passes of an export, and compare the program after each: first the pipeline, then the
lowering passes of each engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.export import ExportedProgram

from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.prepare.reference import reference_of
from enginecast.compiler.request import EngineConfig, computed_dtype
from enginecast.compiler.steps import Steps
from enginecast.exporters.registry import DEFAULT, target_of
from enginecast.passes.ir.base import Pass, Site
from enginecast.passes.ir.edit import structural_copy, value
from enginecast.passes.ir.pipeline import Observer as Watcher
from enginecast.passes.ir.pipeline import PassRun, run_pipeline
from enginecast.passes.lower.drop_assertions import DropAssertions
from enginecast.passes.precision.out_of_range import is_beyond
from enginecast.passes.registry import build
from enginecast.passes.rescale_streams import RescaleStreams, fitted
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.verification.bisect.culprit import Bisection, Culprit, Leave
from enginecast.verification.eager.make_reference import range_culprit
from enginecast.verification.emulate.data import overflow_sentence
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import TrueDtypeRun, true_dtype_check
from enginecast.verification.program.changes import Changes
from enginecast.verification.program.observer import Observer
from enginecast.verification.program.quantized_floor import PlannedFloor
from enginecast.verification.reference import Reference
from enginecast.verification.report.data import PassCheck


@dataclass(frozen=True)
class LoweredProgram:
    """The program of one engine, after the lowering passes of its target."""

    program: ExportedProgram
    runs: tuple[PassRun, ...]
    checks: tuple[PassCheck, ...]
    emulated: TrueDtypeRun | None
    """The run in the target's fp16 or bf16 arithmetic; None for fp32."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on parts of the program that the engine lacks."""
        dropped = [run for run in self.runs if isinstance(run.pass_, DropAssertions)]
        notes = (site.note for run in dropped for site in run.sites if site.note)
        return tuple(dict.fromkeys(notes))


@dataclass(frozen=True)
class Rewritten:
    """A program after its passes, with the results of all comparisons."""

    program: ExportedProgram
    """Before any lowering pass."""
    runs: tuple[PassRun, ...]
    checks: tuple[PassCheck, ...]
    emulated: TrueDtypeRun | None
    """The run that is judged, in the target's fp16 or bf16 arithmetic: of the first engine's
    lowered program if there is one; None for fp32."""
    reference: Reference
    """The model's reference, its floor widened by the error of a quantization plan."""
    engines: tuple[LoweredProgram, ...] = ()
    """In the order of the bundle; empty if an earlier pass broke its promise."""
    cause: str = ""
    """Where values leave fp16's range, if that caused the failure; else empty."""
    bisection: Bisection | None = None
    """The search for the cause, if the program is wrong and a search was made."""
    dropped: tuple[Culprit, ...] = ()
    """Culprits whose sites were left out."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Why this program must not be lowered, the cause first.

        Failures after the first broken promise are mostly its consequences.
        """
        broken = [check.failure for check in self.every_check if check.failure]
        if not broken:
            return ()
        later = f"; then {len(broken) - 1} later passes, too" if len(broken) > 1 else ""
        return (*self._cause(), f"pass {broken[0]}{later}", *self.blame)

    @property
    def every_check(self) -> tuple[PassCheck, ...]:
        """The checks of all passes, including every engine's lowering passes."""
        return (*self.checks, *(check for engine in self.engines for check in engine.checks))

    @property
    def every_run(self) -> tuple[PassRun, ...]:
        return (*self.runs, *(run for engine in self.engines for run in engine.runs))

    @property
    def suspect(self) -> LoweredProgram | None:
        """The first engine whose lowering broke a promise, else the first engine, if any."""
        broken = (engine for engine in self.engines if any(c.failure for c in engine.checks))
        return next(broken, self.engines[0] if self.engines else None)

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems found by the run in the target's arithmetic."""
        found = self.emulated.problems if self.emulated is not None else ()
        return (*(self._cause() if found and self.cause else found), *self.blame)

    @property
    def blame(self) -> tuple[str, ...]:
        """The culprits in words, with a hint."""
        if self.bisection is None:
            return ()
        hint = self.bisection.hint()
        return (*self.bisection.lines(), *([hint] if hint else ()))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on sites that were left out, with reasons."""
        return tuple(
            f"dropped {len(culprit.left_out)} of {culprit.rewritten} sites: {line}"
            for culprit in self.dropped
            for line in culprit.lines()
        )

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


def fp32_notes(program: ExportedProgram, names: Sequence[str]) -> Iterator[str]:
    """What of a program in fp16 is in fp32, because fp16 does not hold it.

    Args:
        names: of its tensor outputs.
    """
    results = next(iter(program.graph.find_nodes(op="output"))).args[0]
    tensors = [node for node in results if isinstance(value(node), Tensor)]
    for name, node in zip(names, tensors, strict=True):
        if is_beyond(node):
            yield f"output '{name}' is fp32: fp16 does not hold its values"
    kept = [one for one in fitted(program) if one.power is None and not one.is_output]
    if kept:
        place = f"{kept[0].module or 'the model itself'} {kept[0].source}"
        more = f" and {len(kept) - 1} more values" if len(kept) > 1 else ""
        stays = "stay" if more else "stays"
        yield f"{place} (max {kept[0].largest:.3g}){more} {stays} in fp32, with what reads that"


def rewrite(
    prepared: Prepared,
    passes: tuple[Pass, ...],
    reference: Reference,
    steps: Steps,
    leave: Leave = (),
    target: str = DEFAULT,
    engines: Sequence[EngineConfig] = (),
) -> Rewritten:
    """Run the passes on a copy of the captured program, and then for each engine, on a copy of the
    result, the lowering passes of its target.

    A pass that breaks its promise does not stop the others: the report should hold them all. But
    the program is then not lowered, nor is one for which eager itself is not a valid reference.

    Args:
        leave: for each pass, the sites that it leaves alone; empty: none.
        target: the export's target; low precision is judged by its kernels' arithmetic.
        engines: engines to lower for; empty: only the passes are run and judged.
    """
    planned, observer = _observers(prepared, passes, reference)
    program = structural_copy(prepared.captured.program)
    changes = Changes(program)
    watch = (planned, observer, changes)
    with steps("passes"):
        runs = run_pipeline(passes, program, prepared.context, watch, leave)
    reference = planned.reference
    steps.log_passes(runs)
    broken = any(check.failure for check in observer.checks)
    lowered: tuple[LoweredProgram, ...] = ()
    if engines and not broken and not reference.floor.defects:
        lowered = tuple(
            _lower(prepared, program, config, (observer, changes), reference, steps)
            for config in engines
        )
        emulated = lowered[0].emulated
        broken = any(check.failure for engine in lowered for check in engine.checks)
    else:
        emulated = _emulate(prepared, program, reference, target, steps)
    cause = ""
    if reference.floor.dtype == "fp16" and (broken or (emulated and emulated.problems)):
        cause = _range_cause(prepared, runs, emulated)
    checks = _detailed(observer.checks, changes)
    return Rewritten(program, tuple(runs), checks, emulated, reference, lowered, cause)


def _detailed(checks: Sequence[PassCheck], changes: Changes) -> tuple[PassCheck, ...]:
    """The check of each pass, with its sites and changes."""
    pairs = zip(checks, changes.found, strict=True)
    return tuple(replace(check, details=details) for check, details in pairs)


def _lower(
    prepared: Prepared,
    program: ExportedProgram,
    config: EngineConfig,
    before: tuple[Observer, Changes],
    reference: Reference,
    steps: Steps,
) -> LoweredProgram:
    """Run the lowering passes for one engine on a copy of the program."""
    passes, lowered = build(config.lowering), structural_copy(program)
    observer, changes = before[0].fork(), before[1].fork()
    with steps("lowering passes"):
        runs = run_pipeline(passes, lowered, prepared.context, (observer, changes))
    steps.log_passes(runs)
    emulated = _emulate(prepared, lowered, reference, config.target, steps)
    return LoweredProgram(lowered, tuple(runs), _detailed(observer.checks, changes), emulated)


def _observers(
    prepared: Prepared, passes: Sequence[Pass], reference: Reference
) -> tuple[PlannedFloor, Observer]:
    """The observers that run after each pass: the one that widens the floor for a plan, then the
    comparison.
    """
    program, names = prepared.captured.program, prepared.output_names
    inputs = [case.inputs for case in prepared.observed]
    threads = 1 if prepared.is_small else None  # for a plan, more are set around
    with torch_threads(threads):
        known = (prepared.exact.snapshots(inputs), prepared.plain.snapshots(inputs))
    observer = Observer(
        program, prepared.observed, reference, names=names, known=known, threads=threads
    )
    floor = PlannedFloor(
        *(passes, program, prepared.cases, reference, observer, names),
        calibration=prepared.context.calibration,
    )
    return floor, observer


def run_passes(
    prepared: Prepared,
    passes: Sequence[Pass],
    steps: Steps,
    lowering: Sequence[Pass] = (),
    watch: Sequence[Watcher] = (),
    reference: Reference | None = None,
) -> Rewritten:
    """Run passes on a copy of the captured program, for pass development.

    A lowering comes last. The program is compared after each pass, even after a broken promise.

    Args:
        watch: called after each pass, besides the comparison.
        reference: the reference in the dtype that these passes compute in; None: it is made.
    """
    if reference is None:
        with steps("reference"):
            reference = reference_of(prepared, computed_dtype(passes))
    program = structural_copy(prepared.captured.program)
    planned, observer = _observers(prepared, passes, reference)
    with steps("passes"):
        runs = run_pipeline(passes, program, prepared.context, (planned, observer, *watch))
        runs += run_pipeline(lowering, program, prepared.context, (observer, *watch))
    return Rewritten(program, tuple(runs), tuple(observer.checks), None, planned.reference)


def _range_cause(prepared: Prepared, runs: Sequence[PassRun], emulated: TrueDtypeRun | None) -> str:
    """Where values leave fp16's range, or which module output is too large after rescale-streams;
    and what that pass did about it.
    """
    rescaling = [run for run in runs if isinstance(run.pass_, RescaleStreams)]
    overflow = emulated.emulation.overflow if emulated is not None else None
    if overflow is not None and overflow.largest > overflow.max_finite:
        cause = overflow_sentence(overflow)
    else:
        program = structural_copy(prepared.captured.program)
        run_pipeline([run.pass_ for run in rescaling], program, prepared.context)
        cause = range_culprit(program, prepared.cases) or ""
    if cause and not rescaling:
        return f"{cause}, and the pipeline has no {RescaleStreams.name}"
    left = [site for run in rescaling for site in run.sites if site.reason]
    if not cause or not left:
        return cause
    place = left[0].module or "the model itself"
    return f"{cause} ({RescaleStreams.name} left {place}: {left[0].reason})"


def _emulate(
    prepared: Prepared, program: ExportedProgram, reference: Reference, target: str, steps: Steps
) -> TrueDtypeRun | None:
    """Run low precision in GPU arithmetic: the CPU provider computes it in fp32."""
    if reference.floor.dtype == "fp32":
        return None
    with steps(f"emulate {reference.floor.dtype}"):
        return true_dtype_check(
            program,
            prepared.cases,
            reference,
            get_profile(target_of(target).arithmetic),
            names=prepared.output_names,
        )
