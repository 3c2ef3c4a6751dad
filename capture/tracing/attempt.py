"""One attempt to trace a model, and what is said of those that were made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from enginecast.capture.control_flow.detect.findings import summarize
from enginecast.capture.control_flow.detect.recorder import Read
from enginecast.capture.control_flow.detect.reporters import detect
from enginecast.capture.control_flow.operators.sites import Site
from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.refusals.explain import Refusal
from enginecast.capture.tracing.answers.recorded_reads import Guard
from enginecast.errors import CaptureError

Name = Literal["export", "bake", "strict", "rewrite", "specialise", "torchscript"]
Fallback = Literal["none", "rewrite", "specialise", "torchscript"]
OF_OWN_CODE: frozenset[Name] = frozenset({"export", "bake", "strict"})
"""Rungs on which the model's own code is traced, and none that was rewritten."""
Around = Callable[[nn.Module], AbstractContextManager[object]]
Rewriting = Callable[[nn.Module], AbstractContextManager[list[Site]]]


@dataclass(frozen=True)
class Rung:
    """One strategy that was tried, for users."""

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
class Attempt:
    """How a trace is made: in which sizes, by which strategy, and what the code sees."""

    specs: tuple[InputSpec, ...]
    """The inputs, with the sizes that vary."""
    inputs: Mapping[str, Tensor]
    """A tensor for each."""
    name: Name = "export"
    """The rung that it is shown as."""
    effect: str = ""
    """What it does, where that is not the name alone."""
    is_strict: bool = False
    """Whether Dynamo follows the bytecode."""
    around: tuple[Around, ...] = ()
    """Entered while the code runs: answers to what it reads and asks."""
    rewrites: Rewriting | None = None
    """Runs the module with code that was rewritten; gives the places."""
    guards: tuple[Guard, ...] = ()
    """Outputs that the program has besides the model's own."""
    narrows: bool = True
    """Whether ranges that nobody asked for may be narrowed."""
    is_open: bool = False
    """Whether torch does not ask which sizes are 1."""
    is_proved: bool = False
    """Whether torch puts guards that it cannot prove into the program, where every case that is
    verified checks them again."""
    narrowings: int = 0
    notes: tuple[str, ...] = ()
    """On the dimensions that were narrowed."""

    @contextmanager
    def entered(self, module: nn.Module) -> Iterator[list[Site]]:
        """Within the block, `module` runs so; gives the places that are rewritten."""
        with ExitStack() as stack:
            for manager in self.around:
                stack.enter_context(manager(module))
            yield stack.enter_context(self.rewrites(module)) if self.rewrites else []


def _without(rung: Rung, refusal: Refusal) -> Rung:
    """Without the reason, where it is the refusal's own: of sizes, it is long."""
    is_of_sizes = refusal.kind == "specialized-dimension" and rung.place in ("", refusal.place)
    start = refusal.reason.partition(": ")[0]
    is_same = is_of_sizes and rung.reason.startswith(start)
    return replace(rung, reason="for the same reason") if is_same else rung


class RefusedError(CaptureError):
    """torch.export refused a model; also says why, in parts.

    What `runs` of the model read names all places, where torch stops at the first.
    """

    def __init__(
        self,
        refusal: Refusal,
        rungs: Sequence[Rung] = (),
        runs: Sequence[Sequence[Read]] = (),
        why: str = "",
    ) -> None:
        found = detect(refusals=[refusal], runs=runs)
        tried = [f"then {_without(rung, refusal)}" for rung in rungs[1:]]
        summary = [summarize(each for each in found if each.file)] if rungs else []
        super().__init__(
            "\n".join(filter(None, [refusal.message(), *tried, *summary])),
            hint=refusal.hint,
        )
        self.details["control_flow"] = [each.to_json() for each in found]
        self.refusal = refusal
        self.rungs = tuple(rungs)
        self.why = why or refusal.in_short
        """Why the attempt does not help, for its rung."""
