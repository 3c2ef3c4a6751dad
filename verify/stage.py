"""One pass on the program before it: which of its sites do harm, and in which module the error
arises.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch.export import ExportedProgram

from enginecast.errors import EnginecastError
from enginecast.passes.base import Pass, PassContext, Site
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.pipeline import PassRun, run_pipeline
from enginecast.passes.unify_dtype import UnifyDtype
from enginecast.verify.culprit import Culprit, GuiltySite, ModuleError
from enginecast.verify.isolate import isolated
from enginecast.verify.program import Look, Observer
from enginecast.verify.promise import CaseRuns
from enginecast.verify.search import search
from enginecast.verify.verdict import floor_failures

KEPT = 3
"""Modules that are tried in fp32: the one that loses precision, and those around it."""


@dataclass(frozen=True)
class Done:
    """A program after the pass."""

    program: ExportedProgram
    run: PassRun
    look: Look

    @property
    def wrong(self) -> bool:
        return bool(self.look.check.failure)


@dataclass
class Stage:
    """A pass that was found to do harm, and what is needed to run it again.

    Args:
        pass_: the pass.
        position: in the pipeline, from 0.
        before: the program that it gets; not altered.
        context: with the sites that it leaves alone already.
        observer: what found it, with the program before the pass as the last one it accepted.
        judged_as: whose promise is broken; None: the pass's own.
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

    def run(self, leave: Sequence[Site] = ()) -> Done:
        """Run the pass on a copy without some of its sites."""
        keys = frozenset(site.key for site in leave)
        return self.run_as(self.pass_, replace(self.context, skip=self.context.skip | keys))

    def run_as(self, pass_: Pass, context: PassContext) -> Done:
        """Run another form of the pass.

        Raises:
            PassError: the pass does not run so, or what it leaves does not.
        """
        program = structural_copy(self.before)
        looks: list[Look] = []

        def look(found: Pass, changed: ExportedProgram, run: PassRun) -> None:
            looks.append(self.observer.look(self.judged_as or found, changed, run))

        self.trials += 1
        (run,) = run_pipeline((pass_,), program, context, (look,))
        return Done(program, run, looks[0])

    def tried(self, leave: Sequence[Site]) -> Done | None:
        """Like `run`; None when it does not run at all, or does harm."""
        try:
            done = self.run(leave)
        except EnginecastError:
            return None
        return None if done.wrong else done

    def explain(self, whole: Done) -> tuple[Culprit, Done]:
        """Say what does harm, and do without it where that was found to help.

        Args:
            whole: the pass with all of its sites, which is wrong.
        """
        self.modules = self._module_errors(whole)
        if self.pass_.promise == "precision":
            return self._module_that_needs_range(whole), whole
        sites = [site for site in whole.run.sites if site.rewritten]
        reason = self._unable(sites)
        if reason:
            return self._culprit(whole, reason=reason, module=self._entry(whole)), whole
        return self._without_guilty(whole, sites)

    def _without_guilty(self, whole: Done, sites: list[Site]) -> tuple[Culprit, Done]:
        last: list[Done] = []

        def good(kept: Sequence[Site]) -> bool:
            keys = {site.key for site in kept}
            done = self.tried([site for site in sites if site.key not in keys])
            last[:] = last if done is None else [done]
            return done is not None

        suspects = [site for site in sites if self._is_suspect(site)]
        others = [site for site in sites if site not in suspects]
        if suspects and others and good(others):
            # Most often the modules already tell, and few runs are left to do.
            found = search(suspects, lambda some: good(_in_order(sites, [*others, *some])))
        else:
            found = search(sites, good)
        guilty = tuple(GuiltySite(site, self._around(site.module)) for site in found.guilty)
        culprit = self._culprit(
            whole, sites=guilty, undecided=found.undecided, module=self._entry(whole)
        )
        done = self.run([*found.guilty, *found.undecided]) if not last else last[0]
        return culprit, done

    def _unable(self, sites: list[Site]) -> str:
        """Why no site can be blamed; empty when one can."""
        if not sites:
            return "it tells of no site that it rewrote"
        try:
            none = self.run(sites)
        except EnginecastError as error:
            return f"it does not run with all of its sites left alone: {error.message}"
        left = {site.key for site in sites}
        if any(site.rewritten and site.key in left for site in none.run.sites):
            return "it rewrites sites that it was told to leave alone"
        if none.wrong:
            return "it does harm with all of its sites left alone, too"
        return ""

    def _is_suspect(self, site: Site) -> bool:
        error = self._around(site.module)
        return error is not None and error.arises

    def _around(self, module: str) -> ModuleError | None:
        """The error at the innermost boundary around a module."""
        known = {error.module: error for error in self.modules}
        return next((known[path] for path in _around(module) if path in known), None)

    def _entry(self, whole: Done) -> ModuleError | None:
        """Where the error comes in: the first module that makes one of its own, else the place
        where the comparison failed.
        """
        first = next((error for error in self.modules if error.arises), None)
        return first or self._around(whole.look.check.worst_place)

    def _module_errors(self, whole: Done) -> tuple[ModuleError, ...]:
        """Every boundary as the program computes it and isolated; measured as if roundings alone
        had moved, in floors of the value's own dtype.
        """
        self.trials += 2
        observer, runs = self.observer, whole.look.runs
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
        return tuple(
            ModuleError(
                check.place,
                check.source,
                check.ratio,
                ratios.get(check.place),
                None if changed is None else (check.place in changed[0], check.place in changed[1]),
            )
            for check in observer.rules.inner("reordered", runs)
        )

    def _changed(self, runs: Sequence[CaseRuns]) -> set[str]:
        """Modules whose result has other bits than before the pass."""
        checks = self.observer.rules.inner("exact", runs)
        return {check.place for check in checks if check.problem}

    def _module_that_needs_range(self, whole: Done) -> Culprit:
        """The module of a lost precision; for `unify-dtype`, tried in fp32."""
        module, unify = self._worst_module(), self.pass_
        culprit = self._culprit(whole, module=module)
        if module is None or not isinstance(unify, UnifyDtype):
            return culprit
        paths = _around(module.module)
        tried = (path for path in paths[:KEPT] if self._can_stay(unify, path))
        helps = next(tried, None)
        return replace(culprit, keep=_pattern(helps or paths[0]), keep_helps=helps is not None)

    def _can_stay(self, pass_: UnifyDtype, module: str) -> bool:
        """Whether all is well with the module in fp32; a broken floor cannot tell."""
        floor = self.observer.rules.floor
        if floor is None or any(floor_failures(floor)):
            return False
        kept = replace(pass_, keep=(*pass_.keep, _pattern(module)))
        try:
            return not self.run_as(kept, self.context).wrong
        except EnginecastError:
            return False

    def _worst_module(self) -> ModuleError | None:
        """The first that gives values that are not finite, else the one that loses most itself."""
        lost = [error for error in self.modules if error.lost]
        if lost or not self.modules:
            return lost[0] if lost else None
        return max(self.modules, key=lambda error: error.isolated or 0.0)

    def _culprit(
        self,
        whole: Done,
        *,
        sites: tuple[GuiltySite, ...] = (),
        undecided: tuple[Site, ...] = (),
        module: ModuleError | None = None,
        reason: str = "",
    ) -> Culprit:
        return Culprit(
            name=self.pass_.name,
            position=self.position,
            promise=self.pass_.promise,
            failure=whole.look.check.failure,
            rewritten=whole.run.rewritten,
            sites=sites,
            undecided=undecided,
            module=module,
            reason=reason,
        )


def _around(module: str) -> list[str]:
    """The path and those of the modules around it, innermost first, without the root."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _pattern(module: str) -> str:
    return rf"^{re.escape(module)}(\.|$)"


def _in_order(sites: Sequence[Site], chosen: Sequence[Site]) -> list[Site]:
    keys = {site.key for site in chosen}
    return [site for site in sites if site.key in keys]
