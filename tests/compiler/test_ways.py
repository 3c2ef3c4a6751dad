"""What an export tries after what: the list of ways, and the loop that goes through it."""

from collections.abc import Callable

import pytest

from enginecast.capture.refusals.explain import Refusal
from enginecast.capture.tracing.attempt import RefusedError
from enginecast.compiler.export_attempts import (
    Before,
    Cause,
    LeadsOnError,
    Way,
    first_taken,
    ways_for,
)
from enginecast.compiler.request import ModelOptions
from enginecast.errors import CaptureError, LoweringError

Outcome = Callable[[], str | None]
PROGRAM, SCRIPT = "a program of torch.export", "TorchScript"
EXAMPLE = " in the sizes of the example"
HIDDEN = ", hidden from the model's code"
NARROW = ", not rewritten for more sizes"
BOTH = ("program", "script")


def refusal(kind: str) -> RefusedError:
    return RefusedError(Refusal(kind, "model.py", 7, "if x:", "a branch", "", ""))  # type: ignore[arg-type]


def failing(error: Exception) -> Outcome:
    def made() -> str:
        raise error

    return made


def leading(cause: Cause, by_itself: Outcome | None = None, error: str = "") -> Outcome:
    failure = LoweringError(error) if error else None
    return failing(LeadsOnError(cause, error or cause, error=failure, by_itself=by_itself))


def tried(outcomes: dict[str, Outcome], options: ModelOptions | None = None) -> tuple[str, str]:
    """What comes of ways with these outcomes, by name; others have nothing to make."""
    ways = ways_for(options or ModelOptions(), takes=BOTH, is_script=False)

    def make(way: Way, before: Before) -> str | None:
        return outcomes.get(str(way), lambda: None)()

    found = first_taken(ways, make)
    return found.made, "; ".join(str(each) for each in found.tried)


@pytest.mark.parametrize(
    ("outcomes", "last"),
    [
        ({PROGRAM: lambda: "made"}, PROGRAM),
        ({PROGRAM: failing(refusal("data-dependent-branch")), SCRIPT: lambda: "made"}, SCRIPT),
        (
            {
                PROGRAM: failing(refusal("data-dependent-branch")),
                SCRIPT: leading("asks for script", error="of all sizes"),
                f"{SCRIPT} in fixed sizes": lambda: "made",
            },
            f"{SCRIPT} in fixed sizes",
        ),
        (
            {PROGRAM: failing(refusal("operator")), PROGRAM + EXAMPLE: lambda: "made"},
            PROGRAM + EXAMPLE,
        ),
        (
            {
                PROGRAM: leading("more sizes", error="no kernel"),
                PROGRAM + NARROW: failing(LoweringError("no kernel, either")),
                PROGRAM + EXAMPLE: leading("not the model", lambda: "wrong"),
                PROGRAM + EXAMPLE + HIDDEN: lambda: "made",
            },
            PROGRAM + EXAMPLE + HIDDEN,
        ),
        (
            {PROGRAM: leading("not the model", lambda: "wrong"), PROGRAM + HIDDEN: lambda: "made"},
            PROGRAM + HIDDEN,
        ),
    ],
)
def test_an_attempt_leads_on_to_the_next_that_may_help(
    outcomes: dict[str, Outcome], last: str
) -> None:
    made, every = tried(outcomes)
    assert made == "made"
    assert every.split("; ")[-1] == f"{last}: taken"
    assert every.count(": failed") == len(outcomes) - 1


def test_what_an_attempt_comes_to_by_itself_takes_its_place_in_the_list() -> None:
    wrong = leading("not the model", lambda: "rejected")
    made, every = tried(
        {
            PROGRAM: leading("told sizes", wrong),
            PROGRAM + EXAMPLE: failing(CaptureError("no")),
            PROGRAM + HIDDEN: leading("not the model"),
        }
    )
    assert made == "rejected"
    assert every == (
        f"{PROGRAM}: failed: told sizes; {PROGRAM}{EXAMPLE}: failed: no;"
        f" {PROGRAM}: failed: not the model; {PROGRAM}{HIDDEN}: failed: not the model;"
        f" {PROGRAM}: taken"
    )


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        (ModelOptions(fallback="specialise"), SCRIPT),
        (ModelOptions(state="inputs"), SCRIPT),
        (ModelOptions(fallback="none"), HIDDEN),
        (ModelOptions(dynamic=("x:0=1..8",)), "fixed"),
    ],
)
def test_what_a_user_does_not_allow_is_not_tried(options: ModelOptions, lacking: str) -> None:
    every = ways_for(options, takes=BOTH, is_script=False)
    assert every
    assert not [way for way in every if lacking in str(way)]
    assert [way for way in ways_for(ModelOptions(), takes=BOTH, is_script=False)
            if lacking in str(way)]  # fmt: skip
