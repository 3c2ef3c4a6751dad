"""Tracing strategies, and the outcome of each."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from torch import nn

from enginecast.capture.control_flow.detect.detect import detect
from enginecast.capture.control_flow.detect.findings import summarize
from enginecast.capture.control_flow.detect.recorder import Read
from enginecast.capture.python.locations import SourceLocation, Spot
from enginecast.capture.refusals.refusal import Refusal
from enginecast.capture.tracing.answers.oracle import Guard
from enginecast.capture.tracing.patches.data_sizes import sizes_from_none
from enginecast.capture.tracing.patches.equivalents import with_equivalents
from enginecast.capture.tracing.patches.flex_attention import flex_attention_spelled_out
from enginecast.errors import CaptureError

Name = Literal["export", "bake", "strict", "rewrite", "specialise", "torchscript"]
Fallback = Literal["none", "rewrite", "specialise", "torchscript"]
Around = Callable[[nn.Module], AbstractContextManager[object]]


@dataclass(frozen=True)
class Rung:
    """One strategy of the ladder that was tried."""

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
class TracingStrategy:
    """How a trace is made."""

    name: Name = "export"
    effect: str = ""
    """What it does, where that is not the name alone."""
    around: tuple[Around, ...] = ()
    """Context managers for the module that is traced, entered while it is."""
    is_strict: bool = False
    answered: tuple[SourceLocation, ...] = ()
    """Where reads of weights are answered."""
    narrows: bool = True
    """Whether ranges that nobody asked for may be narrowed."""
    guards: tuple[Guard, ...] = ()
    """Outputs that the program has besides the model's own."""
    branches: Callable[[], tuple[SourceLocation, ...]] = tuple
    """Once it was taken: file and line of what became an operator."""
    dropping: Callable[[], tuple[SourceLocation, ...]] = tuple
    """Likewise, of what drops a tensor on one path, which the program keeps on both."""
    settled: Callable[[], frozenset[Spot]] = frozenset
    """Likewise, what stayed Python, for what it asks is known while tracing."""
    idle: Callable[[], frozenset[SourceLocation]] = frozenset
    """Likewise, lines whose branches compute nothing, as those that warn: no path is compared."""
    why: Callable[[Refusal], str] = attrgetter("in_short")
    """Why it does not help, once it was refused too."""

    def entered(self, module: nn.Module) -> ExitStack:
        """All of `around`, for `module`, and forwards that torch.export takes."""
        stack = ExitStack()
        stack.enter_context(with_equivalents(module))
        stack.enter_context(flex_attention_spelled_out())
        stack.enter_context(sizes_from_none())
        for manager in self.around:
            stack.enter_context(manager(module))
        return stack


class RefusedError(CaptureError):
    """torch.export refused a model; also says why, in parts.

    What `runs` of the model read names all places, where torch stops at the first.
    """

    def __init__(
        self, refusal: Refusal, rungs: Sequence[Rung] = (), runs: Sequence[Sequence[Read]] = ()
    ) -> None:
        found = detect(refusals=[refusal], runs=runs)
        tried = [f"then {rung}" for rung in rungs[1:]]
        summary = [summarize(each for each in found if each.file)] if rungs else []
        super().__init__(
            "\n".join(filter(None, [refusal.message(), *tried, *summary])),
            hint=refusal.hint,
        )
        self.details["control_flow"] = [each.to_json() for each in found]
        self.refusal = refusal
        self.rungs = tuple(rungs)
