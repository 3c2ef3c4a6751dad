"""The ladder: strategies to capture a model, tried in order, each with the reason why the one
before it failed.

    export      torch.export, not strict
    bake        the same, with predicates answered that depend on weights alone
    strict      torch.export, strict: Dynamo follows the bytecode
    bake        not strict again, and the values of small constants are known as well
    rewrite     control flow rewritten to torch.cond, while_loop, scan, torch.where
    specialise  one path taken, and outputs that tell whether it was the right one
    torchscript what the caller does when all of these refuse

Nothing below `export` is tried for a model that `export` takes in all its sizes.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from enginecast.capture.control_flow.converters.convert import restructure
from enginecast.capture.control_flow.detect.recorder import Read, record
from enginecast.capture.control_flow.operators.selections import noting_selections
from enginecast.capture.control_flow.operators.sites import NOTHING, PYTHON, SETTLED, Site
from enginecast.capture.python.locations import SourceLocation, Spot
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.refusals.refusal import Refusal
from enginecast.capture.sources.source import Source
from enginecast.capture.tracing.answers.known_constants import knowing_constants
from enginecast.capture.tracing.answers.oracle import answering, baked_places, guarding, guards_of
from enginecast.capture.tracing.answers.possible_values import answering_certain
from enginecast.capture.tracing.answers.questions import all_as_eager, hiding_trace
from enginecast.capture.tracing.answers.size_numbers import following_numbers, numbers_of
from enginecast.capture.tracing.ladder.paths import Paths
from enginecast.capture.tracing.ladder.shapes import FrozenDimensionError
from enginecast.capture.tracing.ladder.strategy import (
    Around,
    Fallback,
    RefusedError,
    Rung,
    TracingStrategy,
)
from enginecast.capture.tracing.ladder.trace import Traced
from enginecast.errors import CaptureError

LEADS_ON = frozenset(
    {
        "data-dependent-branch",
        "data-dependent-size",
        "data-leaves-torch",
        "specialized-dimension",
    }
)
"""Kinds of refusals that another rung may help with."""
LEADS_TO_STRICT = frozenset(
    {"other-tensors", "scripted-part", "unsupported-python", "operator", "model-error"}
)
"""Kinds with which Dynamo may help: it follows the code of a subclass, or of what was scripted."""
RAISED = frozenset({"model-error", "operator"})
"""Kinds with which the model's code, or an operator that it calls, raised an error."""
MOST_REWRITES = 8
"""How often code is rewritten for one more place; each costs a trace."""
LONGEST_SEARCH = 120.0
"""Seconds after which no further place is rewritten."""
REWRITES = ("rewrite", "specialise", "torchscript")
"""Fallbacks that allow to rewrite."""


@dataclass(frozen=True)
class LadderResult:
    """What was captured, and how."""

    traced: Traced
    strategy: TracingStrategy
    rungs: tuple[Rung, ...]
    """What was tried, in order; the last one was taken."""
    is_widened: bool = False
    """Whether a plain export takes the model as well, in fewer sizes."""


@dataclass(frozen=True)
class Ladder:
    """Climbs down from torch.export as far as it may."""

    source: Source
    attempt: Callable[[TracingStrategy], Traced]
    cases: Callable[[], Sequence[Mapping[str, Tensor]]]
    """Makes inputs of different sizes; a specialised program goes the path of the first."""
    fallback: Fallback
    widens: bool = True
    """Whether the user's own code is rewritten for the sizes that a plain export does not take."""
    values: Mapping[str, range] = field(default_factory=dict)
    """The values that inputs may have, where they are few."""

    def climb(self) -> LadderResult:
        """The first trace that succeeds, and what was tried up to it.

        Raises:
            RefusedError: nothing helped, or nothing can.
            CaptureError: a loop of the model does not end, or a size that was asked for cannot
                vary.
        """
        rungs: list[Rung] = []
        runs: list[list[Read]] = []
        errors: list[CaptureError] = []
        for strategy in self._strategies(rungs, runs, errors):
            try:
                traced = self.attempt(strategy)
            except CaptureError as error:
                if not rungs and not _leads_on(error):
                    return self._answered(error) or self._strict(error)
                errors.append(error)
                rungs.append(_refused(strategy, error))
            else:
                rungs.append(Rung(strategy.name, "taken", strategy.effect))
                return self._widened(LadderResult(traced, strategy, tuple(rungs)))
        first = errors[0]
        if isinstance(first, RefusedError):
            raise RefusedError(first.refusal, rungs, runs) from first.__cause__
        raise first

    def as_eager(self) -> LadderResult:
        """Trace along the code that eager runs.

        The model's code does not see the trace.  A module that tests values is traced once for each
        answer.

        Raises:
            CaptureError: torch.export refuses that code.
        """
        paths = Paths()
        effect = (
            "the model's code does not see the trace; a module that tests values is traced once for"
            " each answer"
        )
        around = (hiding_trace, paths.active)
        strategy = TracingStrategy("rewrite", effect, around, branches=paths.branches)
        return LadderResult(
            self.attempt(strategy), strategy, (Rung(strategy.name, "taken", effect),)
        )

    def _answered(self, error: CaptureError) -> LadderResult | None:
        """What is traced where the model's code, which raised an error, and the libraries that it
        calls are answered that nothing is traced; None where that does not help.
        """
        if not isinstance(error, RefusedError) or error.refusal.kind not in RAISED:
            return None
        effect = "code that asks whether it is traced is answered as in eager"
        strategy = TracingStrategy("export", effect, (all_as_eager,))
        try:
            traced = self.attempt(strategy)
        except CaptureError:
            return None
        rungs = (_refused(TracingStrategy("export"), error), Rung("export", "taken", effect))
        return LadderResult(traced, strategy, rungs)

    def _strict(self, error: CaptureError) -> LadderResult:
        """What Dynamo makes of it, where that may help; else the error as it is."""
        if not isinstance(error, RefusedError) or error.refusal.kind not in LEADS_TO_STRICT:
            raise error
        strategy = TracingStrategy("strict", is_strict=True)
        try:
            traced = self.attempt(strategy)
        except CaptureError:
            raise error from error.__cause__
        rungs = (_refused(TracingStrategy("export"), error), Rung("strict", "taken"))
        return LadderResult(traced, strategy, rungs)

    def _strategies(
        self, rungs: list[Rung], runs: list[list[Read]], errors: Sequence[CaptureError]
    ) -> Iterator[TracingStrategy]:
        """The rungs, each made when the one before has failed; the model is run after the first."""
        yield TracingStrategy("export")
        module = self.source.eager()
        with quiet_torch():
            runs += record(module, self.cases())
        baked = _baked(runs, module, self.values)
        if baked.around:
            yield baked
        yield TracingStrategy("strict", is_strict=True)
        effect = "; ".join(filter(None, [baked.effect, "values of small constants are known"]))
        yield replace(baked, effect=effect, around=(*baked.around, knowing_constants))
        rungs.pop()  # where it does not help, there may be no such constants at all
        if self.fallback in REWRITES:
            reads = {read.place for run in runs for read in run if read.decides != "weights"}
            places = reads | {_split(rung.place) for rung in rungs if rung.place}
            yield from _rewrites(places, baked, rungs, errors)
        if self.fallback == "specialise" and runs:
            yield _specialised(runs[0])

    def _widened(self, captured: LadderResult) -> LadderResult:
        """The same model for all sizes, where rewriting its own code makes that possible.

        Code that goes through the rows of an input one by one is unrolled by a plain export, for
        one number of rows.  Only the user's own code is rewritten for this: a library's may well
        have a branch on sizes at every layer.
        """
        narrowed = captured.traced.narrowed
        may = self.widens and self.fallback in REWRITES
        if not narrowed or captured.strategy.name != "export" or not may:
            return captured
        if not restructure(self.source.empty()).functions:
            return captured
        strategy = replace(_rewritten((), TracingStrategy()), narrows=False)
        try:
            traced = self.attempt(strategy)
        except CaptureError:
            return captured
        refused = Rung("export", "refused", "; ".join(narrowed))
        return LadderResult(traced, strategy, (refused, Rung("rewrite", "taken")), is_widened=True)


def _leads_on(error: CaptureError) -> bool:
    """Whether another strategy may help where the first one failed."""
    if isinstance(error, RefusedError):
        return error.refusal.kind in LEADS_ON
    return isinstance(error, FrozenDimensionError)


def _refused(strategy: TracingStrategy, error: CaptureError) -> Rung:
    if isinstance(error, RefusedError):
        return Rung(strategy.name, "refused", strategy.why(error.refusal), error.refusal.place)
    return Rung(strategy.name, "refused", error.message)


def _split(place: str) -> SourceLocation:
    file, _, line = place.rpartition(":")
    return SourceLocation(file, int(line)).resolved


def _baked(
    runs: Sequence[Sequence[Read]], module: nn.Module, values: Mapping[str, range]
) -> TracingStrategy:
    """Answers what depends on weights alone, and what comes out the same for all values of inputs;
    follows numbers that buffers hold through what is computed from them and from sizes.  Does
    nothing where there is none of these.
    """
    places = baked_places(runs)
    numbers = numbers_of(module)
    effects: list[str] = []
    around: list[Around] = []
    if places:
        effects.append(f"depends on weights alone: {'; '.join(map(str, places))}")
        around.append(partial(answering, reads=runs[0], places=places))
    if numbers:
        effects.append(f"whole numbers in buffers are known: {', '.join(numbers)}")
        around.append(partial(following_numbers, known=numbers))
    if values and _are_alike(runs):
        effects.append(f"tests with one answer for all values of {', '.join(values)} are answered")
        around.append(partial(answering_certain, known=values))
    return TracingStrategy("bake", "; ".join(effects), tuple(around), answered=places)


def _are_alike(runs: Sequence[Sequence[Read]]) -> bool:
    """Whether a test of inputs came out the same wherever it was seen."""
    seen: dict[SourceLocation, set[bool]] = {}
    for read in (read for run in runs for read in run if read.decides == "inputs"):
        if isinstance(read.value, bool):
            seen.setdefault(read.place, set()).add(read.value)
    return any(len(answers) == 1 for answers in seen.values())


def _rewritten(places: Collection[SourceLocation], baked: TracingStrategy) -> TracingStrategy:
    """Rewrites the functions that hold `places`, or all of the user's own."""
    sites: list[Site] = []

    @contextmanager
    def active(module: nn.Module) -> Iterator[None]:
        restructured = restructure(module, sorted(places), baked.answered)
        sites[:] = restructured.sites
        with restructured.active(), noting_selections():
            yield

    def branches() -> tuple[SourceLocation, ...]:
        became = [site for site in sites if site.became not in SETTLED]
        return tuple(SourceLocation(site.file, site.line).resolved for site in became)

    def dropping() -> tuple[SourceLocation, ...]:
        found = [site for site in sites if site.drops]
        return tuple(SourceLocation(site.file, site.line).resolved for site in found)

    def settled() -> frozenset[Spot]:
        stayed = [site for site in sites if site.became == PYTHON]
        return frozenset((SourceLocation(s.file, s.line).resolved, s.column) for s in stayed)

    def idle() -> frozenset[SourceLocation]:
        lines: dict[SourceLocation, set[str]] = {}
        for site in sites:
            lines.setdefault(SourceLocation(site.file, site.line), set()).add(site.became)
        return frozenset(place.resolved for place, became in lines.items() if became == {NOTHING})

    def why(refusal: Refusal) -> str:
        """The reason why the line that was refused was left as it is; else what torch says."""
        left = (
            f"{refusal.in_short}; this {site.was} was not rewritten: {site.reason}"
            for site in sites
            if site.reason and (site.file, site.line) == (refusal.file, refusal.line)
        )
        return next(left, refusal.in_full)

    around = (*baked.around, active)
    return TracingStrategy(
        "rewrite",
        baked.effect,
        around,
        branches=branches,
        dropping=dropping,
        settled=settled,
        idle=idle,
        why=why,
    )


def _rewrites(
    places: Collection[SourceLocation],
    baked: TracingStrategy,
    rungs: list[Rung],
    errors: Sequence[CaptureError],
) -> Iterator[TracingStrategy]:
    """Rewrites the functions that hold `places`, and then, one after another, those that hold the
    places to which only rewritten code comes.

    The search is bounded: the rung says so where it ends early.
    """
    until = time.monotonic() + LONGEST_SEARCH
    known = set(places)
    for count in range(1, MOST_REWRITES + 1):
        yield _rewritten(known, baked)
        refused = rungs[-1]
        further = {_split(refused.place)} - known if refused.place else set()
        if not further or not _leads_on(errors[-1]):
            return
        if count == MOST_REWRITES or time.monotonic() > until:
            rungs[-1] = replace(refused, reason=f"{refused.reason} ({_stopped(count)})")
            return
        rungs.pop()
        known |= further


def _stopped(count: int) -> str:
    times = "time" if count == 1 else "times"
    return (
        f"rewritten {count} {times}, each for a place that the one before came to; the search ends"
        f" after {MOST_REWRITES} or {LONGEST_SEARCH:.0f} s, and what lies behind was not looked at"
    )


def _specialised(reads: Sequence[Read]) -> TracingStrategy:
    """Takes the path of one run; the program returns for which inputs that is right."""
    guards = guards_of(reads)
    places = dict.fromkeys(f"{guard.read.file}:{guard.read.line}" for guard in guards)
    effect = f"takes one path, and refuses inputs that want another: {'; '.join(places)}"
    return TracingStrategy("specialise", effect, (partial(guarding, reads=reads),), guards=guards)
