"""What an export tries, in order: one list of ways to make the engines, each with
what it goes on after."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from enginecast.capture.tracing.attempt import RefusedError
from enginecast.capture.tracing.ladder import LEADS_ON
from enginecast.capture.tracing.sizes.shapes import FrozenDimensionError
from enginecast.compiler.request import ModelOptions
from enginecast.errors import (
    CaptureError,
    EnginecastError,
    LoweringError,
    PassError,
    VerificationError,
    first_line,
)

Cause = Literal["refused", "sizes", "asks for script"]
"""Why a way ends, so that another may help: torch.export refused the model's control flow;
sizes that vary may be the reason of a failure; code asks whether it is TorchScript."""
OTHER_SIZES: frozenset[Cause] = frozenset({"sizes", "asks for script"})
"""Those after which other sizes are tried."""
OF_SIZES = frozenset({"specialized-dimension", "operator", "model-error"})
"""Kinds of refusals that sizes may be the reason of."""
Made = TypeVar("Made")


@dataclass(frozen=True)
class Way:
    """One way to make the engines of a model."""

    makes: Literal["program", "script"] = "program"
    """What they are made from: a program of torch.export, or TorchScript."""
    sizes: Literal["all", "example", "fixed"] = "all"
    """"example": only those vary that the user asked for; "fixed": none does."""
    after: frozenset[Cause] = frozenset()
    """It is tried where the one before ended for one of these causes."""

    def follows(self, last: "Way", causes: Collection[Cause]) -> bool:
        """Whether it is tried after another one that ended for these causes."""
        fits = self.sizes == last.sizes or not self.after.isdisjoint(OTHER_SIZES)
        return fits and not self.after.isdisjoint(causes)

    def __str__(self) -> str:
        what = "a program of torch.export" if self.makes == "program" else "TorchScript"
        sizes = {"example": " in the sizes of the example", "fixed": " in fixed sizes"}
        return f"{what}{sizes.get(self.sizes, '')}"


FIRST = Way()
WAYS = (
    FIRST,
    Way("script", after=frozenset({"refused"})),
    Way("script", "fixed", after=frozenset({"asks for script"})),
    Way(sizes="example", after=frozenset({"sizes"})),
    Way("script", "example", after=frozenset({"refused"})),
)
OF_SCRIPT = (
    Way("script"),
    Way("script", "fixed", after=frozenset({"asks for script"})),
    Way("script", "example", after=frozenset({"sizes"})),
)
"""For a model, or a target, that knows no programs."""


def ways_for(options: ModelOptions, *, takes: Collection[str], is_script: bool) -> tuple[Way, ...]:
    """The ways to try for a model, in order.

    Args:
        takes: what the target makes engines of: "program", "script".
        is_script: whether the model is TorchScript.
    """
    every = OF_SCRIPT if is_script or "program" not in takes else WAYS
    return tuple(
        way
        for way in every
        if (every is OF_SCRIPT or way.makes in takes)
        and (every is OF_SCRIPT or way.makes == "program" or may_be_script(options))
        and not (way.sizes == "fixed" and options.dynamic)
    )


def may_be_script(options: ModelOptions) -> bool:
    """Whether an export may go on with the module itself."""
    # Of a module itself no calls in turn would be compared.
    return options.furthest == "torchscript" and not options.kv_cache and not options.stateful


class SizesDecideError(CaptureError):
    """Code asks whether it is TorchScript, and sizes vary beyond those that were compared."""

    def __init__(self, message: str, why: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.why = why or message
        """The same, without what was tried before."""


def causes_of(error: EnginecastError | None) -> frozenset[Cause]:
    """What a failure leads on by."""
    if isinstance(error, RefusedError):
        kinds: dict[Cause, bool] = {
            "refused": error.refusal.kind in LEADS_ON,
            "sizes": error.refusal.kind in OF_SIZES,
        }
        return frozenset(cause for cause, holds in kinds.items() if holds)
    if isinstance(error, SizesDecideError):
        return frozenset({"asks for script"})
    of_sizes = (FrozenDimensionError, PassError, LoweringError, VerificationError)
    return frozenset({"sizes"}) if isinstance(error, of_sizes) else frozenset()


@dataclass(frozen=True)
class Tried:
    """A way that was tried, and what came of it."""

    way: Way
    outcome: Literal["taken", "failed"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.way}: {self.outcome}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Before:
    """What a next way knows of those before it."""

    last: Way = FIRST
    asks_for_script: str = ""
    """Which code asks whether it is TorchScript."""
    in_all_sizes: str = ""
    """Why the last one in all sizes did."""
    refused: RefusedError | None = None
    """The last refusal of torch.export."""


@dataclass(frozen=True)
class Taken(Generic[Made]):
    """What came of the ways that were tried."""

    made: Made
    tried: tuple[Tried, ...]


def first_taken(ways: Sequence[Way], make: Callable[[Way, Before], Made | None]) -> Taken[Made]:
    """Try the first way, and after each that fails the next that follows it.

    Args:
        make: makes engines in one; None: there is nothing to it for this model.

    Raises:
        EnginecastError: none leads anywhere. The failure in all sizes is the one that counts, but
            for sizes that the program does not have.
    """
    tried: list[Tried] = []
    before, causes = Before(), frozenset[Cause]()
    last: EnginecastError | None = None
    whole: EnginecastError | None = None
    for way in ways:
        if tried and not way.follows(tried[-1].way, causes):
            continue
        try:
            made = make(way, before)
        except EnginecastError as error:
            last, causes = error, causes_of(error)
        else:
            if made is None:
                continue
            return Taken(made, (*tried, Tried(way, "taken")))
        short = first_line(last)
        tried.append(Tried(way, "failed", short))
        refused = last if isinstance(last, RefusedError) else before.refused
        asks = last.why if isinstance(last, SizesDecideError) else ""
        if way.sizes == "example":
            before = replace(before, last=way, asks_for_script=asks, refused=refused)
        else:
            before, whole = Before(way, asks, short, refused), last
    counts = last if whole is None or isinstance(whole, FrozenDimensionError) else whole
    assert counts is not None  # the first way is always tried
    raise counts
