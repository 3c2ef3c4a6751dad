"""The ladder: ways to capture a model, tried in order, each with the reason why the one above
failed.

    export      torch.export, not strict
    bake        the same, with predicates answered that depend on weights alone
    strict      torch.export, strict: Dynamo follows the bytecode
    rewrite     control flow rewritten to torch.cond, while_loop, scan, torch.where
    specialise  one way taken, and an output that tells whether it was the right one
    torchscript what the caller does when all of these refuse (see `enginecast.script_job`)

Nothing below `export` is tried for a model that `export` takes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

from torch import Tensor, nn

from enginecast.capture.oracle import Guard, answering, baked_places, guarding, guards_of
from enginecast.capture.quiet import quiet_torch
from enginecast.capture.recorder import Read, record
from enginecast.capture.refusal import Refusal
from enginecast.capture.source import Source
from enginecast.errors import CaptureError

Name = Literal["export", "bake", "strict", "rewrite", "specialise", "torchscript"]
Fallback = Literal["none", "rewrite", "specialise", "torchscript"]
Around = Callable[[nn.Module], AbstractContextManager[object]]
T = TypeVar("T")

LEADS_ON = frozenset({"data-dependent-branch", "data-dependent-size", "data-leaves-torch"})
"""Kinds of refusals that another rung may help with."""


@dataclass(frozen=True)
class Rung:
    """One way that was tried."""

    name: Name
    outcome: Literal["taken", "refused"]
    reason: str = ""
    """Why it was refused, or what it did."""
    place: str = ""
    """FILE:LINE of the culprit."""

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{self.name} {self.outcome}{where}{why}"


@dataclass(frozen=True)
class Way:
    """How a trace is made."""

    name: Name = "export"
    told: str = ""
    """What it does, where that is not the name alone."""
    around: tuple[Around, ...] = ()
    """Context managers for the module that is traced, entered while it is."""
    is_strict: bool = False
    guards: tuple[Guard, ...] = ()
    """Outputs that the program has besides the model's own."""

    def entered(self, module: nn.Module) -> ExitStack:
        """All of `around`, for `module`."""
        stack = ExitStack()
        for manager in self.around:
            stack.enter_context(manager(module))
        return stack


class RefusedError(CaptureError):
    """torch.export refused a model; also says why, in parts.

    Args:
        refusal: the parts.
        rungs: what was tried, in order.
    """

    def __init__(self, refusal: Refusal, rungs: Sequence[Rung] = ()) -> None:
        tried = [f"then {rung}" for rung in rungs[1:]]
        super().__init__("\n".join([refusal.message(), *tried]), hint=refusal.hint)
        self.refusal = refusal
        self.rungs = tuple(rungs)


@dataclass(frozen=True)
class Climbed(Generic[T]):
    """What was made, and how."""

    made: T
    way: Way
    rungs: tuple[Rung, ...]
    """What was tried, in order; the last one was taken."""


@dataclass
class Ladder(Generic[T]):
    """Climbs down from torch.export as far as it may.

    Args:
        source: the model.
        attempt: makes a trace in some way, or raises `RefusedError`.
        cases: makes inputs of different sizes to run the model on; a specialised program goes the
            way of the first.
        fallback: how far it may go.
    """

    source: Source
    attempt: Callable[[Way], T]
    cases: Callable[[], Sequence[Mapping[str, Tensor]]]
    fallback: Fallback

    def climb(self) -> Climbed[T]:
        """The first trace that succeeds, and what was tried up to it.

        Raises:
            RefusedError: nothing helped, or nothing can.
            CaptureError: a loop of the model does not end.
        """
        rungs: list[Rung] = []
        first: RefusedError | None = None
        for way in self._ways():
            try:
                made = self.attempt(way)
            except RefusedError as error:
                refusal = error.refusal
                rungs.append(Rung(way.name, "refused", refusal.reason, refusal.place))
                first = first or error
                if refusal.kind not in LEADS_ON and len(rungs) == 1:
                    raise
            else:
                rungs.append(Rung(way.name, "taken", way.told))
                return Climbed(made, way, tuple(rungs))
        assert first is not None  # the first way was refused
        raise RefusedError(first.refusal, rungs) from first.__cause__

    def _ways(self) -> Iterator[Way]:
        """The rungs, each made when the one before has failed."""
        yield Way("export")
        runs = self._recorded()
        baked = _baked(runs)
        if baked.around:
            yield baked
        yield Way("strict", is_strict=True)
        if self.fallback == "specialise" and runs:
            yield _specialised(runs[0])

    def _recorded(self) -> list[list[Read]]:
        """What runs of the real model read."""
        module = self.source.eager()
        with quiet_torch():
            return record(module, self.cases())


def _baked(runs: Sequence[Sequence[Read]]) -> Way:
    """Answers what depends on weights alone; does nothing where there is no such read."""
    places = baked_places(runs)
    if not places:
        return Way("bake")
    told = "; ".join(f"{file}:{line}" for file, line in places)
    around = (partial(answering, reads=runs[0], places=places),)
    return Way("bake", f"depends on weights alone: {told}", around)


def _specialised(reads: Sequence[Read]) -> Way:
    """Goes the way of one run; the program tells for which inputs that is right."""
    guards = guards_of(reads)
    places = dict.fromkeys(f"{guard.read.file}:{guard.read.line}" for guard in guards)
    told = f"takes one way, and refuses inputs that want another: {'; '.join(places)}"
    return Way("specialise", told, (partial(guarding, reads=reads),), guards=guards)
