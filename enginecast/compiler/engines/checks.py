"""What an engine is judged by: the evidence on its program, and a list of checks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.prepare.reference import place_of_loss
from enginecast.compiler.request import EngineConfig
from enginecast.runtime.bundle.manifest import GenerationCheck, StepCheck, Verdict
from enginecast.runtime.engine import Engine
from enginecast.verification.eager.other_kernels import FEW
from enginecast.verification.emulate.run import TrueDtypeRun
from enginecast.verification.engine import translation_failures, verify_engine, where_it_ran
from enginecast.verification.floor import KERNELS, LIMIT
from enginecast.verification.metrics import Comparison
from enginecast.verification.reference import Reference, ReferenceCase
from enginecast.verification.verdict import judge, noted


@dataclass(frozen=True)
class Twin:
    """The result of running an engine file that cannot run here with its 16-bit values in fp32."""

    measured: Comparison | None = None
    """Metrics against the reference; None if it did not run."""
    problems: tuple[str, ...] = ()
    note: str = ""
    """A note on what was run, for the verdict."""
    edges: tuple[str, ...] = ()
    """Names of the edge cases that it was compared on."""
    in_turn: GenerationCheck | StepCheck | None = None
    """The comparison over consecutive calls."""
    reference: Reference | None = None
    """What the engine has to be judged by where it runs, if that is not the model's."""


@dataclass(frozen=True)
class Criteria:
    """The evidence that engines made from one program, or module, are judged by."""

    reference: Reference
    emulated: TrueDtypeRun | None = None
    """The run of the program in the arithmetic of the engine's target; None for fp32, or without a
    program."""
    problems: tuple[str, ...] = ()
    """Reasons to reject, found before the engine ran."""

    def judge(
        self,
        engine: Engine | None = None,
        more: Sequence[str] = (),
        twin: Twin | None = None,
    ) -> Verdict:
        """Run an engine over all cases and judge it.

        Without an engine, judge the program and the engine file as run in fp32.

        Args:
            more: additional reasons to reject it.
            twin: the fp32 run of an engine that does not run here.
        """
        emulated = self.emulated.measured if self.emulated is not None else None
        twin = twin or Twin()
        problems = (*self.problems, *more, *twin.problems)
        if engine is not None:
            verdict = verify_engine(engine, self.reference, emulated=emulated, problems=problems)
        else:
            verdict = judge(
                twin.measured,
                self.reference.floor,
                where=where_it_ran(),
                engine_ran=False,
                emulated=emulated,
                problems=problems,
                edges=twin.edges,
            )
        verdict = noted(verdict, (twin.note,) if twin.note else ())
        if self.emulated is None:
            return verdict
        return msgspec.structs.replace(verdict, arithmetic=self.emulated.emulation.profile)


@dataclass(frozen=True)
class Running:
    """An engine that runs, and what is known of it."""

    engine: Engine
    criteria: Criteria
    config: EngineConfig | None = None
    """Of an engine that is being made."""
    threads: int | None = None
    is_twin: bool = False
    """Whether it is the engine file with its 16-bit values in fp32."""
    wrong: tuple[str, ...] = ()
    """What was found so far."""


@dataclass(frozen=True)
class Examined:
    """What a check found of an engine."""

    wrong: tuple[str, ...] = ()
    in_turn: GenerationCheck | StepCheck | None = None
    """The comparison over consecutive calls; None for an engine without state."""
    reference: Reference | None = None
    """What the engine has to be judged by from now on, if that is not the model's."""


@dataclass(frozen=True)
class Judged:
    """A verdict, and the reference that it was reached by, if that is another one than the
    model's.
    """

    verdict: Verdict
    reference: Reference | None = None


class Check:
    """Something that engines are judged by besides their outputs; by itself it finds nothing."""

    without_run: str = ""
    """What is wrong with an engine that nothing here runs, not even in fp32."""

    def examine(self, running: Running) -> Examined:
        """Run the engine before it is judged."""
        return Examined()

    def reconsider(self, running: Running, judged: Judged) -> Judged:
        """Look at a verdict again."""
        return judged


@dataclass(frozen=True)
class Translated(Check):
    """An engine file that runs in fp32 computes what its program does with 16-bit values widened to
    fp32, in one correct way or another.
    """

    widened: Callable[[], Iterable[Sequence[ReferenceCase]]]
    """The program's outputs, in each way."""

    def examine(self, running: Running) -> Examined:
        reference = running.criteria.reference
        if not running.is_twin or running.wrong or reference.floor.rounding:
            return Examined()
        wrong: tuple[str, ...] = ()
        for cases in self.widened():
            wrong = tuple(translation_failures(running.engine, cases, reference))
            if not wrong:
                break
        return Examined(wrong)


@dataclass(frozen=True)
class OtherKernels(Check):
    """An engine that was rejected, or accepted, by little is judged by a reference that has the
    error of other kernels.
    """

    wider: Callable[[Reference], Reference]

    def reconsider(self, running: Running, judged: Judged) -> Judged:
        verdict, criteria = judged.verdict, running.criteria
        is_beyond = verdict.outcome == "rejected" or bool(verdict.accepted)
        if not is_beyond or criteria.problems or running.wrong:
            return judged
        if not _is_near(verdict, criteria.reference):
            return judged
        remade = self.wider(criteria.reference)
        again = replace(criteria, reference=remade).judge(running.engine)
        if again.outcome == "rejected" or len(again.excesses) > len(verdict.excesses):
            return judged
        return Judged(again, remade)


def _is_near(verdict: Verdict, reference: Reference) -> bool:
    """Whether the error of an fp32 engine is small enough to come from other kernels."""
    floor, cases = reference.floor, reference.cases
    if floor.dtype != "fp32" or floor.rounding:
        return False
    return all(
        (found.error or 0.0) <= LIMIT * max(found.floor or 0.0, KERNELS)
        or all(case.outputs[found.name].size < FEW for case in cases)
        for found in verdict.outputs
    )


@dataclass(frozen=True)
class PlacesOfLoss(Check):
    """Names the ops in which errors beyond their limits may arise."""

    prepared: Prepared

    def reconsider(self, running: Running, judged: Judged) -> Judged:
        verdict = judged.verdict
        places: dict[str, str] = {}
        for excess in verdict.excesses:
            if excess.output not in places:
                places[excess.output] = place_of_loss(self.prepared, excess.output, excess.case)
        excesses = tuple(
            msgspec.structs.replace(excess, place=places[excess.output])
            for excess in verdict.excesses
        )
        notes = (
            f"output {output!r}: kernels lose most digits in {place}"
            for output, place in places.items()
            if place
        )
        reasons = (*verdict.reasons, *notes)
        changed = msgspec.structs.replace(verdict, excesses=excesses, reasons=reasons)
        return replace(judged, verdict=changed)
