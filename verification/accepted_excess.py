"""Errors that are larger than the floor allows, and that a user accepts by name (`--accept`).

Only an error of floats can be accepted: not what is infinite or NaN, not another shape or dtype,
not integers, and not what is wrong with the program.
"""

import math
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from enginecast.errors import UsageError
from enginecast.runtime.bundle.manifest import Excess, Verdict

UNBOUNDED = {"fp32": 1e-3, "fp16": 0.25, "bf16": 0.25}
"""Largest error that is accepted without a bound."""
SLACK = 2.0
"""Without a bound, later comparisons may find this many times the error: a machine with other
vectors adds in another order."""


class ExcessReason(str):
    """A reason to reject an engine that a user may accept."""

    excess: Excess

    def __new__(cls, text: str, excess: Excess) -> "ExcessReason":
        """A sentence, and what it is about."""
        made = super().__new__(cls, text)
        made.excess = excess
        return made


def placed(prefix: str, reason: str, **place: str) -> str:
    """A reason with a prefix; the fields of `place` say what its excess is of."""
    if not isinstance(reason, ExcessReason):
        return prefix + reason
    return ExcessReason(prefix + reason, replace(reason.excess, **place))


@dataclass(frozen=True)
class Acceptance:
    """What `--accept OUTPUT[/CASE][=BOUND]` accepts."""

    output: str
    case: str = ""
    """Empty: all cases, and their error together."""
    bound: float | None = None
    """The largest relative error; None: `UNBOUNDED`."""

    @property
    def name(self) -> str:
        """As the option names it."""
        return name_of(self.output, self.case)


def name_of(output: str, case: str) -> str:
    """How `--accept` names the error of an output, in a case or (empty) in all of them."""
    return f"{output}/{case}" if case else output


def parse_accept(text: str, outputs: Sequence[str] = (), cases: Sequence[str] = ()) -> Acceptance:
    """What a text accepts: "score", "score/tiny values" or "score=2e-5".

    Args:
        outputs: the known names, which may hold "/" and "=" themselves.

    Raises:
        UsageError: it names no output, or its bound is not a number between 0 and 1.
    """
    known = {name_of(output, case): (output, case) for case in (*cases, "") for output in outputs}
    name, equals, number = text.rpartition("=")
    bound = None
    if equals and text not in known:
        with suppress(ValueError):
            bound = float(number)
    name = text if bound is None else name
    output, case = known.get(name) or name.partition("/")[::2]
    if not output or (bound is not None and not 0 < bound < 1):
        raise UsageError(
            f"--accept {text}: expected OUTPUT, OUTPUT/CASE or one of them with a bound between 0"
            " and 1, such as 'score/tiny values=2e-5'"
        )
    return Acceptance(output, case, bound)


def accepted_before(verdict: Verdict) -> tuple[Acceptance, ...]:
    """What was accepted when a verdict was reached."""
    return tuple(
        Acceptance(e.output, "" if e.accepted == e.output else e.case, e.bound)
        for e in verdict.accepted
    )


def check_names(accept: Sequence[Acceptance], outputs: Iterable[str], cases: Iterable[str]) -> None:
    """Refuse to accept what does not exist.

    Raises:
        UsageError: names what does.
    """
    for asked in accept:
        for kind, name, known in (("output", asked.output, outputs), ("case", asked.case, cases)):
            if name and name not in (names := list(known)):
                raise UsageError(
                    f"--accept {asked.name}: there is no {kind} {name!r}",
                    hint=f"There are {', '.join(map(repr, names))}.",
                )


def sort_out(
    reasons: Sequence[str], accept: Sequence[Acceptance], dtype: str, noise: Container[str] = ()
) -> tuple[list[str], tuple[Excess, ...]]:
    """The reasons to reject that nothing accepts, and all errors beyond their limits.

    Args:
        noise: outputs that eager's rounding alone decides, in which any error may be accepted.
    """
    left: list[str] = []
    excesses: list[Excess] = []
    for reason in reasons:
        if not isinstance(reason, ExcessReason):
            left.append(reason)
            continue
        excess = reason.excess
        by = next((a for a in accept if _accepts(a, excess, dtype, noise)), None)
        if by is None:
            left.append(str(reason))
        else:
            bound = SLACK * excess.error if by.bound is None else by.bound
            excess = replace(excess, accepted=by.name, bound=bound)
        excesses.append(excess)
    return left, tuple(excesses)


def _accepts(asked: Acceptance, excess: Excess, dtype: str, noise: Container[str]) -> bool:
    bound = _most(excess, dtype, noise) if asked.bound is None else asked.bound
    is_named = asked.output == excess.output and asked.case in ("", excess.case)
    return is_named and excess.error <= bound


def _most(excess: Excess, dtype: str, noise: Container[str]) -> float:
    return math.inf if excess.output in noise else UNBOUNDED.get(dtype, 0.0)


def way_out(reasons: Sequence[str], dtype: str, noise: Container[str] = ()) -> str:
    """The options that would accept all reasons, in a sentence; empty where none can."""
    excesses = [reason.excess for reason in reasons if isinstance(reason, ExcessReason)]
    if not reasons or len(excesses) < len(reasons):
        return ""
    if any(excess.error > _most(excess, dtype, noise) for excess in excesses):
        return ""
    whole = {excess.output for excess in excesses if not excess.case}
    names = [n.output if n.output in whole else name_of(n.output, n.case) for n in excesses]
    options = " ".join(f"--accept '{name}'" for name in dict.fromkeys(names))
    return f"if this is good enough: {options}"


def described(verdict: Verdict) -> str:
    """What was accepted, for the line of a verdict; empty where nothing was."""
    accepted = verdict.accepted
    if not accepted:
        return ""
    worst = max(accepted, key=lambda excess: excess.error / excess.limit)
    names = ", ".join(repr(name) for name in dict.fromkeys(excess.accepted for excess in accepted))
    return f" except {names}, accepted at up to {worst.error:.2g} (limit {worst.limit:.2g})"
