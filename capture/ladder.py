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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, TypeVar

from torch import Tensor, nn

from enginecast.capture.oracle import answering, baked_places
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

    is_strict: bool = False
    around: tuple[Around, ...] = ()
    """Context managers for the module that is traced, entered while it is."""

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


@dataclass
class Ladder(Generic[T]):
    """Climbs down from torch.export as far as it may.

    Args:
        source: the model.
        attempt: makes a trace in some way, or raises `RefusedError`.
        cases: makes inputs of different sizes to run the model on, those of the trace first.
        fallback: how far it may go.
    """

    source: Source
    attempt: Callable[[Way], T]
    cases: Callable[[], Sequence[Mapping[str, Tensor]]]
    fallback: Fallback
    rungs: list[Rung] = field(default_factory=list)

    def climb(self) -> tuple[T, tuple[Rung, ...]]:
        """The first trace that succeeds, and what was tried up to it.

        Raises:
            RefusedError: nothing helped, or nothing can.
            CaptureError: a loop of the model does not end.
        """
        try:
            made = self.attempt(Way())
        except RefusedError as error:
            if error.refusal.kind not in LEADS_ON:
                raise
            first = error
        else:
            self.rungs.append(Rung("export", "taken"))
            return made, tuple(self.rungs)
        # Outside of the handler, or what is raised below would have this error as its context.
        return self._go_on(first)

    def _go_on(self, first: RefusedError) -> tuple[T, tuple[Rung, ...]]:
        self._refused("export", first)
        way = Way()
        baked = self._baked()
        if baked is not None:
            way, told = baked
            made = self._try("bake", way, told)
            if made is not None:
                return made, tuple(self.rungs)
        for name, other in (("strict", Way(is_strict=True)), *self._below(way)):
            made = self._try(name, other)
            if made is not None:
                return made, tuple(self.rungs)
        raise RefusedError(first.refusal, self.rungs) from first.__cause__

    def _below(self, way: Way) -> list[tuple[Name, Way]]:
        """The rungs that change what the model's code does."""
        return []

    def _try(self, name: Name, way: Way, told: str = "") -> T | None:
        try:
            made = self.attempt(way)
        except RefusedError as error:
            self._refused(name, error)
            return None
        self.rungs.append(Rung(name, "taken", told))
        return made

    def _refused(self, name: Name, error: RefusedError) -> None:
        refusal = error.refusal
        self.rungs.append(Rung(name, "refused", refusal.reason, refusal.place))

    def _baked(self) -> tuple[Way, str] | None:
        """A way that answers what depends on weights alone, and what it answers; None: nothing."""
        runs = self._recorded()
        places = baked_places(runs)
        if not places:
            return None
        way = Way(around=(partial(answering, reads=runs[0], places=places),))
        told = "; ".join(f"{file}:{line}" for file, line in places)
        return way, f"depends on weights alone: {told}"

    def _recorded(self) -> list[list[Read]]:
        """What runs of the real model read; nothing where it does not run on these inputs."""
        module = self.source.eager()
        with quiet_torch():
            return record(module, self.cases())
