"""Find inputs for both ways of every branch: a way that nobody took was not verified."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath

import torch
from torch import Tensor, nn

from enginecast.capture.coverage import Coverage, Predicate, Ways, find_predicates
from enginecast.capture.examples import Case
from enginecast.capture.inputs import InputSpec
from enginecast.capture.perturb import perturbed
from enginecast.capture.places import Place
from enginecast.capture.quiet import quiet_torch
from enginecast.capture.recorder import Recorder
from enginecast.errors import CaptureError

MOST_TRIALS = 160
"""Runs of the model in search of ways that the verification inputs do not take."""


@dataclass(frozen=True)
class Branches:
    """Predicates that decide about a capture, and inputs that take their ways."""

    cases: tuple[Case, ...]
    """What has to be added to the verification inputs so that every way that was found is taken."""
    verified: tuple[str, ...]
    """Predicates of which both ways were seen, as FILE:LINE."""
    unverified: tuple[str, ...]
    """Those of which one way was found, or none: FILE:LINE, the code, and what it always was."""


def cover(
    module: nn.Module,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    places: Collection[Place],
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
    unverified = [
        *(f"{file}:{line}: its source cannot be read" for file, line in found.unseen),
        *(f"{p.place}: `{p.code}` {ways.told(p)}" for p in ways.open()),
        *(f"{p.place}: `{p.code}` was never reached" for p in _unreached(found, ways)),
    ]
    both = [p.place for p, seen in ways.seen.items() if len(seen) > 1]
    return Branches(tuple(added), tuple(both), tuple(unverified))


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
    return f"{PurePath(predicate.file).name}:{predicate.line}"


def _is_open(found: Coverage, ways: Ways) -> bool:
    return bool(ways.open() or _unreached(found, ways))


def _unreached(found: Coverage, ways: Ways) -> list[Predicate]:
    met = ways.seen.keys() | ways.passed
    return [predicate for predicate in found.predicates if predicate not in met]
