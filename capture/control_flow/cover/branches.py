"""Find inputs for both ways of every branch: a way that nobody took was not verified."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from typing import NamedTuple

import torch
from torch import Tensor, nn

from enginecast.capture.control_flow.cover.coverage import (
    Coverage,
    Predicate,
    Ways,
    find_predicates,
)
from enginecast.capture.control_flow.detect.recorder import Recorder
from enginecast.capture.inputs.examples import Case
from enginecast.capture.inputs.perturb import perturbed
from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.python.locations import SourceLocation, is_library_code
from enginecast.capture.python.quiet import quiet_torch
from enginecast.errors import CaptureError

MOST_TRIALS = 160
"""Runs of the model in search of ways that the verification inputs do not take."""


class Unverified(NamedTuple):
    """A branch of which no input took one of the paths."""

    place: str
    """FILE:LINE."""
    seen: str
    """The code, and what it always was."""

    def __str__(self) -> str:
        return f"unverified branch: {self.place}: {self.seen}"


@dataclass(frozen=True)
class Branches:
    """Predicates that decide about a capture, and inputs that take their ways."""

    cases: tuple[Case, ...]
    """What has to be added to the verification inputs so that every way that was found is taken."""
    verified: tuple[str, ...]
    """Predicates of which both ways were seen, as FILE:LINE."""
    unverified: tuple[Unverified, ...]
    """Those of which one path was found, or none."""
    in_libraries: tuple[Unverified, ...]
    """The same within torch, transformers or Python, whose branches reject no model."""


def cover(
    module: nn.Module,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    places: Collection[SourceLocation],
    seed: int,
) -> Branches:
    """Run `module` until both ways of each predicate were seen, or the search is over.

    Args:
        module: the eager model.
        specs: its inputs, with the ranges of their sizes.
        cases: the verification inputs; those that the user gave come first.
        places: file and line of what decides.
        seed: of the search.

    Raises:
        CaptureError: a loop that does not end on one of `cases`.
    """
    found = find_predicates(module, cases[0].inputs, places)
    ways = Ways()
    added: list[Case] = []
    has_run = False
    with quiet_torch():
        for case in cases:
            try:
                ways.add(_run(module, found, case.inputs))
            except CaptureError:
                raise
            except Exception:  # the model's own; the comparison with eager will tell of it
                continue
            has_run = True
        if has_run and _is_open(found, ways):  # else eager runs on nothing, and that is told
            added = _search(module, found, specs, cases, ways, seed)
    left = [
        *((place, "its source cannot be read") for place in found.unseen),
        *((p.place, f"`{p.code}` {ways.told(p)}") for p in ways.open()),
        *((p.place, f"`{p.code}` was never reached") for p in _unreached(found, ways)),
    ]
    return Branches(
        tuple(added),
        verified=tuple(str(p.place) for p, seen in ways.seen.items() if len(seen) > 1),
        unverified=tuple(
            Unverified(str(place), seen) for place, seen in left if not is_library_code(place.file)
        ),
        in_libraries=tuple(
            Unverified(str(place), seen) for place, seen in left if is_library_code(place.file)
        ),
    )


def _search(
    module: nn.Module,
    found: Coverage,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    ways: Ways,
    seed: int,
) -> list[Case]:
    added: list[Case] = []
    bases = [case.inputs for case in cases]
    for inputs in islice(perturbed(specs, bases, seed), MOST_TRIALS):
        try:
            seen = _run(module, found, inputs)
        except Exception:  # the model's own, at values that nobody promised it takes
            continue
        new = _news(seen, ways)
        if ways.add(seen):
            added.append(Case(f"other way at {', '.join(new)}", inputs))
        if not _is_open(found, ways):
            break
    return added


def _run(module: nn.Module, found: Coverage, inputs: Mapping[str, Tensor]) -> Ways:
    """What one run takes; the recorder stops loops without end."""
    with found.watched() as ways, torch.no_grad(), Recorder(module, inputs):
        module(**inputs)
    return ways


def _news(seen: Ways, ways: Ways) -> list[str]:
    fresh = [p for p, taken in seen.seen.items() if taken - ways.seen.get(p, set())]
    return list(dict.fromkeys(_short(p) for p in fresh if len(ways.seen.get(p, ())) < 2))


def _short(predicate: Predicate) -> str:
    return f"{PurePath(predicate.place.file).name}:{predicate.place.line}"


def _is_open(found: Coverage, ways: Ways) -> bool:
    return bool(ways.open() or _unreached(found, ways))


def _unreached(found: Coverage, ways: Ways) -> list[Predicate]:
    met = ways.seen.keys() | ways.passed
    return [predicate for predicate in found.predicates if predicate not in met]
