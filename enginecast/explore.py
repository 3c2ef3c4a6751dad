"""Which ways a model takes: what Python reads of its tensors, and inputs for ways not yet taken."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from enginecast.capture.coverage import find_predicates
from enginecast.capture.examples import Case
from enginecast.capture.places import Place
from enginecast.capture.recorder import Read, record
from enginecast.cases import cover_branches
from enginecast.scripted import ScriptModel


@dataclass(frozen=True)
class Explored:
    """What Python reads of tensors while the model runs, and which ways that decides."""

    runs: list[list[Read]]
    """The reads of each case, where inputs or sizes decide."""
    unverified: dict[Place, str]
    """Predicates of which one way was seen, however inputs were changed, and what it was."""
    verified: tuple[str, ...] = ()
    """Which branches were seen both ways, as a note."""

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(dict.fromkeys(read.place for run in self.runs for read in run))

    def unseen(self, decided: Collection[Place], baked: Collection[Place]) -> tuple[str, ...]:
        """What an engine decides without having been compared both ways, in words.

        Args:
            decided: places at which it takes a way of its own.
            baked: places at which it always takes the way of the trace.
        """
        told = {place: self.unverified[place] for place in decided if place in self.unverified}
        for (file, line), value in _one_sided(self.runs, baked).items():
            text = f"unverified branch: {file}:{line}: Python always read {value}"
            told.setdefault((file, line), text)
        return tuple(told.values())


def explore(model: ScriptModel, places: Collection[Place]) -> tuple[ScriptModel, Explored]:
    """Run the model to find what decides, and inputs that take the ways nobody took.

    Args:
        places: more of what decides, as torch.export named it.

    Returns:
        The model with more cases, and what was found.

    Raises:
        CaptureError: a loop without end.
    """
    module = model.source.eager(torch.float32)
    runs = _reads(module, model.cases)
    met = {read.place for run in runs for read in run} | {*places}
    if not met:
        return model, Explored(runs, {})
    first = model.cases[0].inputs
    predicates = met - {*find_predicates(module, first, met).unseen}
    covered = cover_branches(model.source, model.inputs, model.cases, predicates)
    if len(covered.cases) > len(model.cases):
        model = replace(model, inputs=covered.inputs, cases=covered.cases)
        runs = _reads(module, model.cases)
    unverified = {
        place: text
        for place in predicates
        for text in covered.unverified
        if text.startswith(f"unverified branch: {place[0]}:{place[1]}:")
    }
    return model, Explored(runs, unverified, covered.verified)


def _reads(module: nn.Module, cases: Sequence[Case]) -> list[list[Read]]:
    runs = record(module, [case.inputs for case in cases])
    return [[read for read in run if read.decides != "weights"] for run in runs]


def _one_sided(runs: Sequence[Sequence[Read]], places: Collection[Place]) -> dict[Place, str]:
    """Places at which every case read the same of its inputs, and what."""
    seen: dict[Place, set[tuple[str, ...]]] = {}
    for run in runs:
        found: dict[Place, list[str]] = {}
        for read in run:
            if read.decides == "inputs":
                found.setdefault(read.place, []).append(str(read.value))
        for place, values in found.items():
            seen.setdefault(place, set()).add(tuple(values))
    return {
        place: ", ".join(next(iter(seen[place])))
        for place in places
        if len(seen.get(place, ())) == 1
    }
