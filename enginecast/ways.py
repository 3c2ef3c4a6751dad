"""Verification inputs for every way through the branches and loops that a program holds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor
from torch.export import ExportedProgram

from enginecast.capture.examples import Case
from enginecast.capture.inputs import InputSpec
from enginecast.capture.perturb import perturbed
from enginecast.cases import SEED, Covered, widened
from enginecast.passes.ways import Way, ways, ways_taken

MOST_TRIALS = 60
"""Runs of the program in search of ways that no case takes."""
WATCHED = 2
"""Cases that every pass is watched on, besides those that take ways of their own."""


@dataclass(frozen=True)
class Watched:
    """Cases, and those among them that every pass is watched on."""

    covered: Covered
    cases: tuple[Case, ...]
    """Few, and together they run every block that any case runs."""


def cover_ways(
    program: ExportedProgram,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    known: Sequence[str] = (),
    trials: int = MOST_TRIALS,
) -> Watched:
    """Find cases for the ways of a program that `cases` do not take, and choose those to watch.

    Args:
        program: as captured, with blocks.
        specs: its inputs.
        cases: the verification inputs.
        known: places, as "model.py:26", whose ways were looked at in the source already.
        trials: runs in search of other cases, at most.
    """
    every = ways(program)
    taken = ways_taken(program, [case.inputs for case in cases])
    added = list(_search(program, specs, cases, every, frozenset().union(*taken), trials))
    cases = (*cases, *(case for case, _ in added))
    taken += [found for _, found in added]
    missing = [text for way, text in every.items() if not any(way in t for t in taken)]
    fresh = {text.partition(": ")[0]: None for text in every.values()} if not missing else {}
    told = [place for place in fresh if place not in known]
    covered = Covered(
        inputs=tuple(widened(spec, [case for case, _ in added]) for spec in specs),
        cases=cases,
        verified=(f"every way of the program verified: {', '.join(told)}",) if told else (),
        unverified=tuple(
            f"unverified branch: {text}" for text in missing if text.partition(": ")[0] not in known
        ),
    )
    return Watched(covered, tuple(_watched(cases, taken)))


def _search(
    program: ExportedProgram,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    every: Mapping[Way, str],
    seen: frozenset[Way],
    trials: int,
) -> Iterator[tuple[Case, frozenset[Way]]]:
    bases: list[Mapping[str, Tensor]] = [case.inputs for case in cases]
    for inputs in islice(perturbed(specs, bases, SEED), trials):
        if every.keys() <= seen:
            return
        try:
            [found] = ways_taken(program, [inputs])
        except Exception:  # at values that nobody promised it takes
            continue
        new = [every[way].partition(": ")[0] for way in found - seen if way in every]
        if new:
            yield Case(f"other way at {', '.join(dict.fromkeys(new))}", dict(inputs)), found
        seen |= found


def _watched(cases: Sequence[Case], taken: Sequence[frozenset[Way]]) -> Iterator[Case]:
    seen: set[Way] = set()
    for index, (case, found) in enumerate(zip(cases, taken, strict=True)):
        if index < WATCHED or not found <= seen:
            seen |= found
            yield case
