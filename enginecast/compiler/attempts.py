"""What an export tries, in order: one list of attempts, each with what it goes on after."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from enginecast.capture.tracing.attempt import RefusedError
from enginecast.capture.tracing.ladder import LEADS_ON
from enginecast.capture.tracing.sizes.shapes import FrozenDimensionError
from enginecast.compiler.request import ModelOptions
from enginecast.errors import (
    EnginecastError,
    LoweringError,
    PassError,
    VerificationError,
    first_line,
)

Cause = Literal["refused", "sizes", "more sizes", "asks for script", "told sizes", "not the model"]
"""Why an attempt ends, so that another may help: torch.export refused the model's control flow;
sizes that vary may be the reason of a failure; code was rewritten only for more sizes; code asks
whether it is TorchScript; code tells sizes that vary from numbers; the program is not the model."""
OTHER_SIZES: frozenset[Cause] = frozenset({"sizes", "told sizes", "asks for script"})
"""Those after which other sizes are tried."""
OF_SIZES = frozenset({"specialized-dimension", "operator", "model-error"})
"""Kinds of refusals that sizes may be the reason of."""
Made = TypeVar("Made")


@dataclass(frozen=True)
class Attempt:
    """One way to make the engines of a model."""

    makes: Literal["program", "script"] = "program"
    """What they are made from: a program of torch.export, or TorchScript."""
    sizes: Literal["all", "example", "fixed"] = "all"
    """"example": only those vary that the user asked for; "fixed": none does."""
    widens: bool = True
    """Whether code may be rewritten only so that more sizes are possible."""
    is_hidden: bool = False
    """Whether the model's code sees that nothing traces it."""
    after: frozenset[Cause] = frozenset()
    """It is made where the one before ended for one of these causes."""

    def follows(self, last: "Attempt", causes: Collection[Cause]) -> bool:
        """Whether it is made after another one that ended for these causes."""
        fits = self.sizes == last.sizes or not self.after.isdisjoint(OTHER_SIZES)
        return fits and not self.after.isdisjoint(causes)

    def __str__(self) -> str:
        what = "a program of torch.export" if self.makes == "program" else "TorchScript"
        sizes = {"example": " in the sizes of the example", "fixed": " in fixed sizes"}
        hidden = ", hidden from the model's code" if self.is_hidden else ""
        narrow = "" if self.widens else ", not rewritten for more sizes"
        return f"{what}{sizes.get(self.sizes, '')}{hidden}{narrow}"


FIRST = Attempt()
ATTEMPTS = (
    FIRST,
    Attempt(is_hidden=True, after=frozenset({"not the model"})),
    Attempt(widens=False, after=frozenset({"more sizes"})),
    Attempt("script", after=frozenset({"refused"})),
    Attempt("script", "fixed", after=frozenset({"asks for script"})),
    Attempt(sizes="example", after=frozenset({"sizes", "told sizes"})),
    Attempt(sizes="example", is_hidden=True, after=frozenset({"not the model"})),
    Attempt(sizes="example", widens=False, after=frozenset({"more sizes"})),
    Attempt("script", "example", after=frozenset({"refused"})),
)
OF_SCRIPT = (
    Attempt("script"),
    Attempt("script", "fixed", after=frozenset({"asks for script"})),
    Attempt("script", "example", after=frozenset({"sizes"})),
)
"""For a model, or a target, that knows no programs."""


def attempts_for(
    options: ModelOptions, *, takes: Collection[str], is_script: bool
) -> tuple[Attempt, ...]:
    """The attempts for a model.

    Args:
        takes: what the target makes engines of: "program", "script".
        is_script: whether the model is TorchScript.
    """
    every = OF_SCRIPT if is_script or "program" not in takes else ATTEMPTS
    return tuple(
        attempt
        for attempt in every
        if (every is OF_SCRIPT or attempt.makes in takes)
        and (every is OF_SCRIPT or attempt.makes == "program" or may_be_script(options))
        and not (attempt.is_hidden and options.furthest == "none")
        and not (attempt.sizes == "fixed" and options.dynamic)
    )


def may_be_script(options: ModelOptions) -> bool:
    """Whether an export may go on with the module itself."""
    # Of a module itself no calls in turn would be compared.
    return options.furthest == "torchscript" and not options.task and not options.state


class LeadsOnError(Exception):
    """An attempt that another one may do better than, and why."""

    def __init__(
        self,
        cause: Cause,
        why: str,
        *,
        error: EnginecastError | None = None,
        by_itself: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(why)
        self.cause: Cause = cause
        self.error = error
        """What it failed with."""
        self.by_itself = by_itself
        """What comes of it where no other helps; None: nothing."""


def causes_of(error: EnginecastError | None) -> frozenset[Cause]:
    """What a failure leads on by."""
    if isinstance(error, RefusedError):
        kinds: dict[Cause, bool] = {
            "refused": error.refusal.kind in LEADS_ON,
            "sizes": error.refusal.kind in OF_SIZES,
        }
        return frozenset(cause for cause, holds in kinds.items() if holds)
    of_sizes = (FrozenDimensionError, PassError, LoweringError, VerificationError)
    return frozenset({"sizes"}) if isinstance(error, of_sizes) else frozenset()


@dataclass(frozen=True)
class Tried:
    """An attempt that was made, and what came of it."""

    attempt: Attempt
    outcome: Literal["taken", "failed"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.attempt}: {self.outcome}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Before:
    """What a next attempt knows of those before it."""

    last: Attempt = FIRST
    why: str = ""
    """Why the last one ended."""
    in_all_sizes: str = ""
    """Why the last one in all sizes did."""
    refused: RefusedError | None = None
    """The last refusal of torch.export."""


@dataclass(frozen=True)
class Taken(Generic[Made]):
    """What the attempts came to."""

    made: Made
    tried: tuple[Tried, ...]


def first_taken(
    attempts: Sequence[Attempt],
    make: Callable[[Attempt, Before], Made | None],
    earlier: tuple[Tried, ...] = (),
) -> Taken[Made]:
    """Make the first attempt, and after each that fails the next that follows it.

    Args:
        make: makes one; None: there is nothing to it for this model.
        earlier: what was tried already.

    Raises:
        EnginecastError: none can be made. The failure in all sizes is the one that counts, but for
            sizes that the program does not have.
    """
    tried: list[Tried] = []
    before, causes = Before(), frozenset[Cause]()
    last: EnginecastError | None = None
    whole: EnginecastError | None = None
    left: tuple[int, Callable[[], Any]] | None = None
    for place, attempt in enumerate(attempts):
        if tried and not attempt.follows(tried[-1].attempt, causes):
            continue
        try:
            made = make(attempt, before)
        except LeadsOnError as found:
            why, last, causes = str(found), found.error, causes_of(found.error) | {found.cause}
            if left is None and found.by_itself is not None:
                left = place, found.by_itself
        except EnginecastError as error:
            why, last, causes = error.message, error, causes_of(error)
        else:
            if made is None:
                continue
            return Taken(made, (*earlier, *tried, Tried(attempt, "taken")))
        short = why if last is None else first_line(last)
        tried.append(Tried(attempt, "failed", short))
        refused = last if isinstance(last, RefusedError) else before.refused
        if attempt.sizes == "example":
            before = replace(before, last=attempt, why=why, refused=refused)
        else:
            before, whole = Before(attempt, why, short, refused), last
    if left is not None:  # the list goes on from what the attempt comes to by itself
        place, by_itself = left
        doubtful = attempts[place]

        def again(attempt: Attempt, before: Before) -> Made | None:
            return by_itself() if attempt is doubtful else make(attempt, before)

        return first_taken(attempts[place:], again, (*earlier, *tried))
    counts = last if whole is None or isinstance(whole, FrozenDimensionError) else whole
    assert counts is not None  # what leads on without an error has something left
    raise counts
