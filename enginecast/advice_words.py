"""What a precision means for a model, in a sentence and in a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from enginecast.terminal import table

CLOSE = 1.0
"""Bits of headroom below which other inputs may well leave the range."""
WIDE = 1e30
"""A limit above it is that of fp32 and bf16."""


@dataclass(frozen=True)
class Place:
    """A value, and how far it reaches."""

    module: str
    source: str
    largest: float

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return f"{self.module or 'the model itself'} reaches {self.largest:.3g}{at}"


@dataclass(frozen=True)
class Option:
    """One precision for one model."""

    precision: str
    limit: float
    """The largest finite number of its compute dtype."""
    remedies: tuple[str, ...] = ()
    """Passes of its preset in front of unify-dtype."""
    as_it_is: tuple[Place, ...] = ()
    """The largest value before any remedy."""
    beyond: tuple[Place, ...] = ()
    """Values beyond the limit before any remedy, the largest first."""
    largest: Place | None = None
    """The largest value, after the remedies where they were needed."""
    left: tuple[Place, ...] = ()
    """Values beyond the limit that the remedies left."""
    keep: str = ""
    """A pattern for --skip-modules-pattern that leaves none beyond the limit."""
    headroom_bits: float | None = None
    """How many times the largest value may double."""
    weight_bytes: int = 0
    error: float | None = None
    """Relative L2 error in true arithmetic of this precision; None: not measured, or not finite."""
    trouble: str = ""
    """What is wrong with the outputs in true arithmetic; empty when nothing is, or not measured."""
    refusal: str = ""
    """Why the passes do not take this model."""
    sentence: str = ""

    @property
    def safe(self) -> bool:
        return not (self.left or self.trouble or self.refusal)


def worded(option: Option, safe: Sequence[str]) -> Option:
    """The option with its sentence.

    Args:
        safe: the precisions that are safe for the model.
    """
    return replace(option, sentence=_sentence(option, safe))


def _sentence(option: Option, safe: Sequence[str]) -> str:
    if option.refusal:
        return f"not possible: {option.refusal}"
    if option.left:
        return f"not safe as it is: {_places(option)}; {_way_out(option, safe)}"
    if option.trouble:
        reach = f", though {option.largest} at most" if option.largest else ""
        return f"not safe: {option.trouble}{reach}; {_way_out(option, safe)}"
    if option.largest is None:
        return "safe: no value is computed in it"
    if option.limit > WIDE:
        return "safe: it has the range of fp32"
    if option.beyond:
        remedies = " and ".join(option.remedies)
        return (
            f"safe with {remedies}, which is in its pipeline: {_places(option)}, and after it"
            f" {option.largest}"
        )
    if option.headroom_bits is not None and option.headroom_bits < CLOSE:
        return f"close: {option.largest} (limit {_limit(option)}); other inputs may pass it"
    return f"safe: {option.largest} (limit {_limit(option)})"


def _places(option: Option) -> str:
    places = option.left or option.beyond
    modules = {place.module for place in places}
    more = f", and {len(modules) - 1} more modules leave it" if len(modules) > 1 else ""
    return f"{places[0]} (limit {_limit(option)}){more}"


def _limit(option: Option) -> str:
    return f"{option.limit:.0f}" if option.limit < 1e6 else f"{option.limit:.2g}"


def _way_out(option: Option, safe: Sequence[str]) -> str:
    others = " or ".join(f"--precision {name}" for name in safe)
    if option.keep:
        return f"it is with --skip-modules-pattern '{option.keep}', or use {others}"
    return f"use {others}" if others else "no precision holds this model"


def print_advice(options: Sequence[Option], recommended: str, cases: int, console: Console) -> None:
    """Show what each precision means and costs."""
    shown = table("precision", "weights", "headroom", "error", "on the inputs that were run")
    for option in options:
        bits = "" if option.headroom_bits is None else f"{option.headroom_bits:g} bits"
        size = _size(option.weight_bytes) if option.weight_bytes else ""
        error = "" if option.error is None else f"{option.error:.1e}"
        shown.add_row(option.precision, size, bits, error, option.sentence)
    console.print(shown)
    console.print(
        f"the cheapest that is safe: --precision {recommended} (ranges of {cases} verification"
        " inputs, run in fp32)"
    )


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
