"""What an export tries after what: the list of ways, and the loop that goes through it."""

from collections.abc import Callable

import pytest

from enginecast.capture.refusals.explain import Refusal
from enginecast.capture.tracing.attempt import RefusedError
from enginecast.compiler.export_attempts import (
    Before,
    SizesDecideError,
    Way,
    first_taken,
    ways_for,
)
from enginecast.compiler.request import ModelOptions

Outcome = Callable[[], str | None]
PROGRAM, SCRIPT = "a program of torch.export", "TorchScript"
EXAMPLE = " in the sizes of the example"
BOTH = ("program", "script")


def refusal(kind: str) -> RefusedError:
    return RefusedError(Refusal(kind, "model.py", 7, "if x:", "a branch", "", ""))  # type: ignore[arg-type]


def failing(error: Exception) -> Outcome:
    def made() -> str:
        raise error

    return made


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
                SCRIPT: failing(SizesDecideError("of all sizes")),
                f"{SCRIPT} in fixed sizes": lambda: "made",
            },
            f"{SCRIPT} in fixed sizes",
        ),
        (
            {PROGRAM: failing(refusal("operator")), PROGRAM + EXAMPLE: lambda: "made"},
            PROGRAM + EXAMPLE,
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


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        (ModelOptions(fallback="specialise"), SCRIPT),
        (ModelOptions(stateful=True), SCRIPT),
        (ModelOptions(dynamic=("x:0=1..8",)), "fixed"),
    ],
)
def test_what_a_user_does_not_allow_is_not_tried(options: ModelOptions, lacking: str) -> None:
    every = ways_for(options, takes=BOTH, is_script=False)
    assert every
    assert not [way for way in every if lacking in str(way)]
    assert [way for way in ways_for(ModelOptions(), takes=BOTH, is_script=False)
            if lacking in str(way)]  # fmt: skip
