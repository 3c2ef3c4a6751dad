"""Find the pass, the rewrite and the module that cause an error.

Most of the answer is known beforehand: every pass was compared with the program before it, so a
broken promise names its pass, and only its rewrites are bisected. If all passes kept their promises
and the outputs are still wrong, the passes are bisected first.

Programs are structural copies, which share weights.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Generic, TypeVar

from torch.export import ExportedProgram

from enginecast.errors import EnginecastError
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import PassRun, run_pipeline
from enginecast.verification.bisect.culprit import (
    Bisection,
    Culprit,
    GuiltySite,
    Leave,
    ModuleError,
)
from enginecast.verification.boundaries import enclosing_modules, isolated
from enginecast.verification.eager.outputs import Case
from enginecast.verification.program.observer import CaseRuns, Observer, PassComparison
from enginecast.verification.reference import Reference
from enginecast.verification.report.data import PassCheck

KEPT = 3
"""Most modules that are tried in fp32: the one that loses precision, and those around it."""
KEEP = "keep"
"""Option of a pass that changes precision: patterns of modules that stay as they are."""


@dataclass(frozen=True)
class Trial:
    """A program after one run of a pass, with the result of the comparison."""

    program: ExportedProgram
    run: PassRun
    comparison: PassComparison

    @property
    def wrong(self) -> bool:
        return bool(self.comparison.check.failure)


@dataclass
class Suspect:
    """A pass that causes an error, and what is needed to run it again.

    Args:
        before: the program that the pass runs on; not altered.
        context: includes the sites that it already leaves alone.
        observer: found the error; it compares with the program before the pass.
        judged_as: the pass whose promise is broken; None: the pass itself.
    """

    pass_: Pass
    position: int
    before: ExportedProgram
    context: PassContext
    observer: Observer
    judged_as: Pass | None = None
    trials: int = 0
    modules: tuple[ModuleError, ...] = field(default=())
    """Every module boundary after the pass, once `explain` has run."""

    def run(self, leave: Sequence[Site] = ()) -> Trial:
        """Run the pass on a copy without some of its sites."""
        keys = frozenset(site.key for site in leave)
        return self.run_as(self.pass_, replace(self.context, skip=self.context.skip | keys))

    def run_as(self, pass_: Pass, context: PassContext) -> Trial:
        """Run another form of the pass.

        Raises:
            PassError: the pass, or its result, does not run.
        """
        program = structural_copy(self.before)
        found: list[PassComparison] = []

        def compare(ran: Pass, changed: ExportedProgram, run: PassRun) -> None:
            found.append(self.observer.compare(self.judged_as or ran, changed, run))

        self.trials += 1
        (run,) = run_pipeline((pass_,), program, context, (compare,))
        return Trial(program, run, found[0])

    def tried(self, leave: Sequence[Site]) -> Trial | None:
        """Like `run`; None if it does not run or causes an error."""
        try:
            done = self.run(leave)
        except EnginecastError:
            return None
        return None if done.wrong else done

    def explain(self, whole: Trial) -> tuple[Culprit, Trial]:
        """Describe the culprits, and skip them if that helps."""
        # Accumulated and isolated errors at every boundary, in floors of the value's dtype.
        self.trials += 2
        observer, runs = self.observer, whole.comparison.runs
        alone = isolated(
            self.before,
            whole.program,
            [case.inputs for case in observer.cases],
            names=observer.names,
            masks=observer.masks,
        )
        apart = [replace(run, after=found) for run, found in zip(runs, alone, strict=True)]
        ratios = {check.place: check.ratio for check in observer.rules.inner("reordered", apart)}
        changed = None
        if self.pass_.promise == "exact" and self.judged_as is None:
            changed = self._changed(runs), self._changed(apart)
        self.modules = tuple(
            ModuleError(
                check.place,
                check.source,
                check.ratio,
                ratios.get(check.place),
                None if changed is None else (check.place in changed[0], check.place in changed[1]),
            )
            for check in observer.rules.inner("reordered", runs)
        )
        culprit = Culprit(
            name=self.pass_.name,
            position=self.position,
            promise=self.pass_.promise,
            failure=whole.comparison.check.failure,
            rewritten=whole.run.rewritten,
        )
        if self.pass_.promise == "precision":
            return self._with_range(culprit), whole
        # Where it arises: the first module with an error of its own, or where it was found.
        first = next((error for error in self.modules if error.arises), None)
        entry = first or self._around(whole.comparison.check.worst_place)
        culprit = replace(culprit, module=entry)
        sites = [site for site in whole.run.sites if site.rewritten]
        if reason := self._blameless(sites):
            return replace(culprit, reason=reason), whole
        last: list[Trial] = []

        def good(kept: Sequence[Site]) -> bool:
            keys = {site.key for site in kept}
            done = self.tried([site for site in sites if site.key not in keys])
            last[:] = last if done is None else [done]
            return done is not None

        errors = {site.key: self._around(site.module) for site in sites}
        suspects = [site for site in sites if (error := errors[site.key]) and error.arises]
        others = [site for site in sites if site not in suspects]
        if suspects and others and good(others):
            # Most often the modules show it already, and few runs are left to do.
            found = search(suspects, lambda some: good([*others, *some]))
        else:
            found = search(sites, good)
        guilty = tuple(GuiltySite(site, errors[site.key]) for site in found.guilty)
        culprit = replace(culprit, sites=guilty, undecided=found.undecided)
        done = self.run([*found.guilty, *found.undecided]) if not last else last[0]
        return culprit, done

    def _blameless(self, sites: list[Site]) -> str | None:
        """Why no site can be blamed; None when one can."""
        if not sites:
            return "it reports no site that it rewrote"
        try:
            none = self.run(sites)
        except EnginecastError as error:
            return f"it does not run with all of its sites left alone: {error.message}"
        left = {site.key for site in sites}
        if any(site.rewritten and site.key in left for site in none.run.sites):
            return "it rewrites sites that it was asked to leave alone"
        if none.wrong:
            return "it does harm with all of its sites left alone, too"
        return None

    def _around(self, module: str) -> ModuleError | None:
        """The error at the innermost boundary around a module."""
        known = {error.module: error for error in self.modules}
        return next((known[path] for path in enclosing_modules(module) if path in known), None)

    def _changed(self, runs: Sequence[CaseRuns]) -> set[str]:
        """Modules whose result changed bits in the pass."""
        checks = self.observer.rules.inner("exact", runs)
        return {check.place for check in checks if check.problem}

    def _with_range(self, culprit: Culprit) -> Culprit:
        """The culprit with the module that loses precision, tried in fp32 if the pass has that
        option.
        """
        # The first with values that are not finite, else the one with the largest error of its own.
        lost = [error for error in self.modules if error.lost]
        by_error = sorted(self.modules, key=lambda error: -(error.isolated or 0.0))
        module = next(iter([*lost, *by_error]), None)
        culprit = replace(culprit, module=module)
        if module is None or not hasattr(self.pass_, KEEP):
            return culprit
        paths = enclosing_modules(module.module)
        tried = (path for path in paths[:KEPT] if self._can_stay(path))
        helps = next(tried, None)
        return replace(culprit, keep=_pattern(helps or paths[0]), keep_helps=helps is not None)

    def _can_stay(self, module: str) -> bool:
        """Whether the outputs are right with the module in fp32, as far as the floor shows it."""
        floor = self.observer.rules.floor
        if floor is None or floor.defects:
            return False
        patterns = (*getattr(self.pass_, KEEP), _pattern(module))
        kept = replace(self.pass_, **{KEEP: patterns})
        try:
            return not self.run_as(kept, self.context).wrong
        except EnginecastError:
            return False


def _pattern(module: str) -> str:
    return rf"^{re.escape(module)}(\.|$)"


@dataclass(frozen=True)
class Whole(Pass):
    """A pass that represents the whole pipeline, whose outputs are judged by eager's error in the
    dtype.
    """

    name: ClassVar[str] = "pipeline"
    promise: ClassVar[Promise] = "precision"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        raise AssertionError("only judged")


WHOLE = Whole()


@dataclass(frozen=True)
class Subject:
    """A pipeline on a program, and the data to judge it."""

    program: ExportedProgram
    """The captured program; not altered."""
    passes: tuple[Pass, ...]
    reference: Reference
    """The reference of all cases, in the target dtype."""
    context: PassContext = field(default_factory=PassContext)
    leave: Leave = ()
    """Sites that each pass leaves alone already; empty: none."""
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.leave:
            object.__setattr__(self, "leave", (frozenset(),) * len(self.passes))

    def observer(self, cases: Sequence[Case], start: ExportedProgram) -> Observer:
        """An observer that compares programs on some cases; `start` is the program before."""
        return Observer(self.program, cases, self.reference, names=self.names, start=start)


def bisect(
    subject: Subject, checks: Sequence[PassCheck], observed: Sequence[Case], wrong: Sequence[Case]
) -> Bisection:
    """Find the culprits.

    Args:
        checks: an `Observer`'s checks, one for each pass.
        observed: the cases that the observer ran.
        wrong: cases in which the outputs of the final program are wrong; used if every pass kept
            its promise.
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
        """Every pass that breaks its promise, in order, each after earlier passes run without their
        guilty sites.
        """
        subject = self._subject
        program = self._prefixes(subject.program, 0, first)[-1]
        observer = subject.observer(observed, program)
        for position in range(first, len(subject.passes)):
            suspect = self._suspect(program, position, observer)
            done = suspect.run()
            if done.wrong:
                done = self._freed(suspect, done)
            else:
                self._trials += suspect.trials
            if done.wrong:
                break  # what is found after it is mostly its consequence
            observer.advance(done.comparison)
            program = done.program
        return self.result(helps=not done.wrong)

    def whole(self, wrong: Sequence[Case]) -> Bisection:
        """The passes after which the outputs are wrong, each after earlier passes run without their
        guilty sites.
        """
        count = len(self._subject.passes)
        prefixes, start = self._prefixes(self._subject.program, 0, count), 0
        observer = self._observer_of_wrong(wrong, prefixes[-1])
        while observer is not None:
            after, is_wrong = prefixes[1:], partial(self._is_wrong, observer)
            first = bisect_left(after, True, hi=len(after) - 1, key=is_wrong)
            suspect = self._suspect(prefixes[first], start + first, observer, WHOLE)
            done = self._freed(suspect, suspect.run())
            if done.wrong:
                break
            start += first + 1
            prefixes = self._prefixes(done.program, start, count)
            if not self._is_wrong(observer, prefixes[-1]):
                return self.result(helps=self._observer_of_wrong(wrong, prefixes[-1]) is None)
        return self.result(helps=False)

    def _freed(self, suspect: Suspect, wrong: Trial) -> Trial:
        """The suspect without its guilty sites."""
        culprit, done = suspect.explain(wrong)
        if self._culprits and self._culprits[-1].position == culprit.position:
            culprit = self._culprits.pop().joined(culprit)
        self._culprits.append(culprit)
        self._leave[culprit.position] |= culprit.left_out
        self._modules = self._modules or suspect.modules
        self._trials += suspect.trials
        return done

    def _suspect(
        self,
        program: ExportedProgram,
        position: int,
        observer: Observer,
        judged_as: Pass | None = None,
    ) -> Suspect:
        subject = self._subject
        context = self._context(position)
        return Suspect(subject.passes[position], position, program, context, observer, judged_as)

    def _context(self, position: int) -> PassContext:
        context = self._subject.context
        return replace(context, skip=context.skip | self._leave[position])

    def _prefixes(self, program: ExportedProgram, start: int, end: int) -> list[ExportedProgram]:
        """The program, and the program after each of some passes."""
        found = [structural_copy(program)]
        for position in range(start, end):
            copy = structural_copy(found[-1])
            context = self._context(position)
            run_pipeline((self._subject.passes[position],), copy, context)
            found.append(copy)
        return found

    def _observer_of_wrong(self, wrong: Sequence[Case], final: ExportedProgram) -> Observer | None:
        """An observer of the first case that shows the final program wrong; None: no case does."""
        for case in wrong:
            observer = self._subject.observer([case], self._subject.program)
            self._trials += 2
            if self._is_wrong(observer, final):
                return observer
        return None

    def _is_wrong(self, observer: Observer, program: ExportedProgram) -> bool:
        self._trials += 1
        return bool(observer.compare(WHOLE, program, PassRun(WHOLE, (), 0.0)).check.failure)

    def result(self, *, helps: bool) -> Bisection:
        """The findings so far."""
        culprits = tuple(self._culprits)
        leave = tuple(self._leave)
        return Bisection(culprits, leave, bool(culprits) and helps, self._trials, self._modules)


Item = TypeVar("Item")
Good = Callable[[Sequence[Item]], bool]
"""Whether the result is correct with all of these items."""


@dataclass(frozen=True)
class Found(Generic[Item]):
    """The result of a search; the three parts together are all of the items."""

    kept: tuple[Item, ...]
    """Items that were tried together without an error."""
    guilty: tuple[Item, ...]
    """Items that each caused an error together with those kept at that point."""
    undecided: tuple[Item, ...]
    """Items left out because the budget did not suffice to separate them."""


def budget_for(count: int) -> int:
    """Most trials of a search among `count` items: enough for about three guilty ones."""
    return 4 + 4 * math.ceil(math.log2(count + 1))


def search(items: Sequence[Item], good: Good[Item], budget: int | None = None) -> Found[Item]:
    """Leave out as few items as repeated bisection can separate.

    Each round finds the shortest harmful prefix of what is left and takes its last item out, so it
    ends whatever the items do to each other: of two that do harm only as a pair, the later goes.

    Args:
        items: cause an error if all are in, and none if none is.
        good: called with items in their order.
        budget: the most trials; None: `budget_for`.
    """
    left = budget_for(len(items)) if budget is None else budget
    kept: tuple[Item, ...] = ()
    guilty: list[Item] = []
    rest = tuple(items)
    harmful = True
    while rest:
        if not harmful:
            if left <= 0:
                return Found(kept, tuple(guilty), rest)
            left -= 1
            if good((*kept, *rest)):
                return Found((*kept, *rest), tuple(guilty), ())
        fine, wrong = 0, len(rest)
        while wrong - fine > 1:
            if left <= 0:
                return Found((*kept, *rest[:fine]), tuple(guilty), rest[fine:])
            left -= 1
            middle = (fine + wrong) // 2
            if good((*kept, *rest[:middle])):
                fine = middle
            else:
                wrong = middle
        guilty.append(rest[fine])
        kept, rest, harmful = (*kept, *rest[:fine]), rest[fine + 1 :], False
    return Found(kept, tuple(guilty), ())
