"""The ladder: ways to capture a model, tried in order, each with the reason why the one above
failed.

    export      torch.export, not strict
    bake        the same, with predicates answered that depend on weights alone
    strict      torch.export, strict: Dynamo follows the bytecode
    rewrite     control flow rewritten to torch.cond, while_loop, scan, torch.where
    specialise  one way taken, and outputs that tell whether it was the right one
    torchscript what the caller does when all of these refuse

Nothing below `export` is tried for a model that `export` takes in all its sizes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from enginecast.capture.oracle import answering, baked_places, guarding, guards_of
from enginecast.capture.places import Place, real_path
from enginecast.capture.quiet import quiet_torch
from enginecast.capture.recorder import Read, record
from enginecast.capture.refusal import Refusal
from enginecast.capture.restructure import restructure
from enginecast.capture.shapes import FrozenDimensionError
from enginecast.capture.source import Source
from enginecast.capture.structured_sites import PYTHON, Site
from enginecast.capture.trace import Traced
from enginecast.capture.way import Fallback, RefusedError, Rung, Way
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
REWRITES = ("rewrite", "specialise", "torchscript")
"""Fallbacks that allow to rewrite."""


@dataclass(frozen=True)
class Climbed:
    """What was made, and how."""

    traced: Traced
    way: Way
    rungs: tuple[Rung, ...]
    """What was tried, in order; the last one was taken."""
    is_widened: bool = False
    """Whether a plain export takes the model as well, in fewer sizes."""


@dataclass(frozen=True)
class Ladder:
    """Climbs down from torch.export as far as it may.

    Args:
        source: the model.
        attempt: makes a trace in some way.
        cases: makes inputs of different sizes to run the model on; a specialised program goes the
            way of the first.
        fallback: how far it may go.
    """

    source: Source
    attempt: Callable[[Way], Traced]
    cases: Callable[[], Sequence[Mapping[str, Tensor]]]
    fallback: Fallback
    widens: bool = True
    """Whether the user's own code is rewritten for the sizes that a plain export does not take."""

    def climb(self) -> Climbed:
        """The first trace that succeeds, and what was tried up to it.

        Raises:
            RefusedError: nothing helped, or nothing can.
            CaptureError: a loop of the model does not end, or a size that was asked for cannot
                vary.
        """
        rungs: list[Rung] = []
        first: CaptureError | None = None
        for way in self._ways(rungs):
            try:
                traced = self.attempt(way)
            except CaptureError as error:
                if not rungs and not _leads_on(error):
                    raise
                first = first or error
                rungs.append(_refused(way, error))
            else:
                rungs.append(Rung(way.name, "taken", way.told))
                return self._widened(Climbed(traced, way, tuple(rungs)))
        assert first is not None  # the first way was refused
        if isinstance(first, RefusedError):
            raise RefusedError(first.refusal, rungs) from first.__cause__
        raise first

    def _ways(self, rungs: Sequence[Rung]) -> Iterator[Way]:
        """The rungs, each made when the one before has failed."""
        yield Way("export")
        runs = self._recorded()
        baked = _baked(runs)
        if baked.around:
            yield baked
        yield Way("strict", is_strict=True)
        if self.fallback in REWRITES:
            reads = {read.place for run in runs for read in run if read.decides != "weights"}
            yield _rewritten(reads | {_split(rung.place) for rung in rungs if rung.place}, baked)
        if self.fallback == "specialise" and runs:
            yield _specialised(runs[0])

    def _widened(self, climbed: Climbed) -> Climbed:
        """The same model for all sizes, where rewriting its own code makes that possible.

        Code that goes through the rows of an input one by one is unrolled by a plain export, for
        one number of rows.  Only the user's own code is rewritten for this: a library's may well
        have a branch on sizes at every layer.
        """
        narrowed = climbed.traced.narrowed
        may = self.widens and self.fallback in REWRITES
        if not narrowed or climbed.way.name != "export" or not may:
            return climbed
        if not restructure(self.source.empty()).functions:
            return climbed
        way = replace(_rewritten((), Way()), narrows=False)
        try:
            traced = self.attempt(way)
        except CaptureError:
            return climbed
        refused = Rung("export", "refused", "; ".join(narrowed))
        return Climbed(traced, way, (refused, Rung("rewrite", "taken")), is_widened=True)

    def _recorded(self) -> list[list[Read]]:
        """What runs of the real model read."""
        module = self.source.eager()
        with quiet_torch():
            return record(module, self.cases())


def _leads_on(error: CaptureError) -> bool:
    """Whether another way may help where the first one failed."""
    if isinstance(error, RefusedError):
        return error.refusal.kind in LEADS_ON
    return isinstance(error, FrozenDimensionError)


def _refused(way: Way, error: CaptureError) -> Rung:
    if isinstance(error, RefusedError):
        return Rung(way.name, "refused", way.why(error.refusal), error.refusal.place)
    return Rung(way.name, "refused", error.message)


def _split(place: str) -> Place:
    file, _, line = place.rpartition(":")
    return real_path(file), int(line)


def _baked(runs: Sequence[Sequence[Read]]) -> Way:
    """Answers what depends on weights alone; does nothing where there is no such read."""
    places = baked_places(runs)
    if not places:
        return Way("bake")
    told = "; ".join(f"{file}:{line}" for file, line in places)
    around = (partial(answering, reads=runs[0], places=places),)
    return Way("bake", f"depends on weights alone: {told}", around, answered=tuple(places))


def _rewritten(places: Sequence[Place] | set[Place], baked: Way) -> Way:
    """Rewrites the functions that hold `places`, or all of the user's own."""
    rewriting = _Rewriting(tuple(sorted(places)), baked.answered)
    around = (*baked.around, rewriting.active)
    return Way("rewrite", baked.told, around, branches=rewriting.branches, why=rewriting.why)


class _Rewriting:
    def __init__(self, places: tuple[Place, ...], answered: tuple[Place, ...]) -> None:
        self._places = places
        self._answered = answered
        self._sites: tuple[Site, ...] = ()

    @contextmanager
    def active(self, module: nn.Module) -> Iterator[None]:
        restructured = restructure(module, self._places, self._answered)
        self._sites = restructured.sites
        with restructured.active():
            yield

    def branches(self) -> tuple[Place, ...]:
        """Where control flow became an operator."""
        became = [site for site in self._sites if site.became not in ("", PYTHON)]
        return tuple((real_path(site.file), site.line) for site in became)

    def why(self, refusal: Refusal) -> str:
        """The reason why the line that was refused was left as it is; else what torch says."""
        left = (
            f"{refusal.told}; this {site.was} was not rewritten: {site.reason}"
            for site in self._sites
            if site.reason and (real_path(site.file), site.line) == (refusal.file, refusal.line)
        )
        return next(left, refusal.in_full)


def _specialised(reads: Sequence[Read]) -> Way:
    """Goes the way of one run; the program tells for which inputs that is right."""
    guards = guards_of(reads)
    places = dict.fromkeys(f"{guard.read.file}:{guard.read.line}" for guard in guards)
    told = f"takes one way, and refuses inputs that want another: {'; '.join(places)}"
    return Way("specialise", told, (partial(guarding, reads=reads),), guards=guards)
