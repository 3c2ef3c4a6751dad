"""A way to trace a model, and what became of it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from torch import nn

from enginecast.capture.oracle import Guard
from enginecast.capture.places import Place
from enginecast.capture.refusal import Refusal
from enginecast.errors import CaptureError

Name = Literal["export", "bake", "strict", "rewrite", "specialise", "torchscript"]
Fallback = Literal["none", "rewrite", "specialise", "torchscript"]
Around = Callable[[nn.Module], AbstractContextManager[object]]
TOLD: Callable[[Refusal], str] = attrgetter("told")


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
    answered: tuple[Place, ...] = ()
    """Where reads of weights are answered."""
    narrows: bool = True
    """Whether ranges that nobody asked for may be narrowed."""
    guards: tuple[Guard, ...] = ()
    """Outputs that the program has besides the model's own."""
    branches: Callable[[], tuple[Place, ...]] = tuple
    """Once it was taken: file and line of what became an operator."""
    why: Callable[[Refusal], str] = TOLD
    """Why it does not help, once it was refused too."""

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
