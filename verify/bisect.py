"""Names the pass, the rewrite and the module that do harm.

Most of the answer is known before: every pass was compared with what was there before it, so a
broken promise has its pass already, and its rewrites are searched by bisection.  Where all passes
kept their promises and the whole is wrong all the same, the passes are bisected first.

Programs are structural copies, which share weights; one case is run where one shows the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch.export import ExportedProgram

from enginecast.errors import EnginecastError
from enginecast.passes.base import Pass, PassContext, Promise, Site
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.pipeline import PassRun, run_pipeline
from enginecast.verify.comparison import Floor
from enginecast.verify.culprit import Bisection, Culprit, Leave, ModuleError
from enginecast.verify.floor import Case
from enginecast.verify.program import Observer
from enginecast.verify.report_data import PassCheck
from enginecast.verify.search import first_wrong
from enginecast.verify.stage import Done, Stage


@dataclass(frozen=True)
class Whole(Pass):
    """Stands for all passes together, whose outputs may be as wrong as eager's in the dtype."""

    name: ClassVar[str] = "pipeline"
    promise: ClassVar[Promise] = "precision"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        raise AssertionError("only judged")


WHOLE = Whole()


@dataclass(frozen=True)
class Subject:
    """A pipeline over a program, and what it is judged with."""

    program: ExportedProgram
    """As captured; not altered."""
    passes: tuple[Pass, ...]
    floor: Floor
    """Eager in the target dtype over all cases."""
    context: PassContext = field(default_factory=PassContext)
    leave: Leave = ()
    """Sites that each pass leaves alone already; empty: none."""
    names: tuple[str, ...] | None = None
    mask_input: str | None = None
    masked: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.leave:
            object.__setattr__(self, "leave", (frozenset(),) * len(self.passes))

    def observer(self, cases: Sequence[Case], start: ExportedProgram) -> Observer:
        """What compares programs on some cases, `start` being the one before."""
        return Observer(
            self.program,
            cases,
            names=self.names,
            floor=self.floor.only(frozenset(case.name for case in cases)),
            mask_input=self.mask_input,
            masked=self.masked,
            start=start,
        )


def bisect(
    subject: Subject, checks: Sequence[PassCheck], observed: Sequence[Case], wrong: Sequence[Case]
) -> Bisection:
    """Find what does harm.

    Args:
        checks: what an `Observer` found, one for each pass.
        observed: the cases that it ran.
        wrong: cases in which the outputs of the final program are wrong; looked at when every pass
            kept its promise.
    """
    search = _Bisect(subject)
    broken = [check.failure != "" for check in checks]
    try:
        if any(broken):
            return search.promises(broken.index(True), observed)
        return search.whole(wrong)
    except EnginecastError:  # a later pass cannot run on what an earlier one leaves without sites
        return search.result(helps=False)


class _Bisect:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._leave = list(subject.leave)
        self._culprits: list[Culprit] = []
        self._modules: tuple[ModuleError, ...] = ()
        self._trials = 0

    def promises(self, first: int, observed: Sequence[Case]) -> Bisection:
        """Every pass that breaks its promise, from the first on, each after those before it were
        freed of what does harm.
        """
        subject = self._subject
        program = self._prefixes(subject.program, 0, first)[-1]
        stage, done = self._seen(program, first, observed)
        for position in range(first, len(subject.passes)):
            if position > first:
                stage = self._stage(done.program, position, stage.observer)
                done = stage.run()
            if done.wrong:
                stage, done = self._confirmed(stage, self._freed(stage, done), observed)
            else:
                self._trials += stage.trials
            if done.wrong:
                break  # what is found after it is mostly its consequence
            stage.observer.accept(done.look)
        return self.result(helps=not done.wrong)

    def whole(self, wrong: Sequence[Case]) -> Bisection:
        """The passes after which the outputs are wrong, each after those before it were freed."""
        count = len(self._subject.passes)
        prefixes, start = self._prefixes(self._subject.program, 0, count), 0
        observer = self._observer_of_wrong(wrong, prefixes[-1])
        while observer is not None:
            first = self._first_wrong(observer, prefixes)
            stage = self._stage(prefixes[first], start + first, observer, WHOLE)
            done = self._freed(stage, stage.run())
            if done.wrong:
                break
            start += first + 1
            prefixes = self._prefixes(done.program, start, count)
            if not self._is_wrong(observer, prefixes[-1]):
                return self.result(helps=self._observer_of_wrong(wrong, prefixes[-1]) is None)
        return self.result(helps=False)

    def _freed(self, stage: Stage, wrong: Done) -> Done:
        """Without what does harm."""
        culprit, done = stage.explain(wrong)
        if self._culprits and self._culprits[-1].position == culprit.position:
            culprit = self._culprits.pop().joined(culprit)
        self._culprits.append(culprit)
        self._leave[culprit.position] |= culprit.left_out
        self._modules = self._modules or stage.modules
        self._trials += stage.trials
        return done

    def _confirmed(self, stage: Stage, done: Done, observed: Sequence[Case]) -> tuple[Stage, Done]:
        """What one case was enough to find is held against all of them."""
        if done.wrong or len(stage.observer.cases) == len(observed):
            return stage, done
        observer = self._subject.observer(observed, stage.before)
        wide = self._stage(stage.before, stage.position, observer)
        done = wide.run()
        self._trials += 3
        return wide, self._freed(wide, done) if done.wrong else done

    def _stage(
        self,
        program: ExportedProgram,
        position: int,
        observer: Observer,
        judged_as: Pass | None = None,
    ) -> Stage:
        subject = self._subject
        context = self._context(position)
        return Stage(subject.passes[position], position, program, context, observer, judged_as)

    def _context(self, position: int) -> PassContext:
        context = self._subject.context
        return replace(context, skip=context.skip | self._leave[position])

    def _prefixes(self, program: ExportedProgram, start: int, end: int) -> list[ExportedProgram]:
        """The program, and what it is after each of some passes."""
        found = [structural_copy(program)]
        for position in range(start, end):
            copy = structural_copy(found[-1])
            context = self._context(position)
            run_pipeline((self._subject.passes[position],), copy, context)
            found.append(copy)
        return found

    def _seen(
        self, program: ExportedProgram, position: int, observed: Sequence[Case]
    ) -> tuple[Stage, Done]:
        """The pass on the fewest cases on which it is seen to break its promise."""
        alone: list[Sequence[Case]] = [[case] for case in observed]
        for cases in [*alone, observed]:
            stage = self._stage(program, position, self._subject.observer(cases, program))
            done = stage.run()
            self._trials += 2
            if done.wrong:
                break
        return stage, done

    def _observer_of_wrong(self, wrong: Sequence[Case], final: ExportedProgram) -> Observer | None:
        """For the first case on which the final program is seen to be wrong; None: none is."""
        for case in wrong:
            observer = self._subject.observer([case], self._subject.program)
            self._trials += 2
            if self._is_wrong(observer, final):
                return observer
        return None

    def _first_wrong(self, observer: Observer, prefixes: Sequence[ExportedProgram]) -> int:
        """The pass that makes a right program a wrong one; counted from the first prefix."""
        after = prefixes[1:]
        return first_wrong(len(after), lambda index: self._is_wrong(observer, after[index]))

    def _is_wrong(self, observer: Observer, program: ExportedProgram) -> bool:
        self._trials += 1
        return bool(observer.look(WHOLE, program, PassRun(WHOLE, (), 0.0)).check.failure)

    def result(self, *, helps: bool) -> Bisection:
        """What was found so far."""
        culprits = tuple(self._culprits)
        leave = tuple(self._leave)
        return Bisection(culprits, leave, bool(culprits) and helps, self._trials, self._modules)
