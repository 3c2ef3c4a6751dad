"""Delta debugging: leave out nodes as long as the pass fails in the same way."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.passes.ir.base import Pass, PassContext
from enginecast.reduce.failure import Failure, examine
from enginecast.reduce.specimen import Specimen, specimen_of
from enginecast.testing import run_on

Say = Callable[[str], None]


@dataclass(frozen=True)
class Reduced:
    """The smallest program that was found."""

    specimen: Specimen
    passes: tuple[Pass, ...]
    """Those that are needed for it to fail, in order."""
    failure: Failure
    nodes: int
    """Of the program that it came from."""
    trials: int
    finished: bool
    """Whether nothing more can be left out; else the time was up."""


@dataclass
class Search:
    """One reduction: what is smallest so far, and the time that is left.

    Args:
        wanted: the failure to keep.
        passes: that fail.
        best: fails so.
        end: `time.monotonic()` at which the search stops.
        say: gets the progress.
    """

    wanted: Failure
    passes: tuple[Pass, ...]
    best: Specimen
    end: float
    say: Say
    trials: int = 0
    late: bool = False
    _start: float = field(default_factory=time.monotonic)

    def accepts(self, candidate: Specimen | None) -> bool:
        """Whether a candidate fails in the same way; if so, it is the best."""
        if candidate is None or self.is_over():
            return False
        self.trials += 1
        if not self.wanted.is_like(examine(candidate, self.passes)):
            return False
        self.best = candidate
        seconds = time.monotonic() - self._start
        count = len(candidate.calls)
        self.say(f"reduce: {count} nodes left after {self.trials} trials, {seconds:.0f} s")
        return True

    def is_over(self) -> bool:
        self.late = self.late or time.monotonic() > self.end
        return self.late


def reduce(
    program: ExportedProgram,
    passes: Sequence[Pass],
    cases: Sequence[Mapping[str, Tensor]],
    *,
    seconds: float,
    say: Say,
) -> Reduced | None:
    """Shrink a program on which passes fail.

    Args:
        program: as captured.
        cases: inputs by name, each of which may show the failure.
        seconds: when they are over, the smallest program so far is the result.
        say: gets the progress.

    Returns:
        None: nothing fails, on any case.
    """
    end = time.monotonic() + seconds
    found = next(_failing(program, passes, cases), None)
    if found is None:
        return None
    best, chosen, failure = found
    say(f"reduce: {failure.message.splitlines()[0]}")
    nodes = len(specimen_of(program, cases[0], dynamic=False).calls)
    search = Search(failure, chosen, best, end, say)
    _shorten(search)
    left = 0
    while not search.is_over() and left != len(search.best.calls):
        left = len(search.best.calls)
        _cut_chunks(search)
        _bypass(search)
    return Reduced(search.best, chosen, failure, nodes, search.trials, not search.late)


def _failing(
    program: ExportedProgram, passes: Sequence[Pass], cases: Sequence[Mapping[str, Tensor]]
) -> Iterator[tuple[Specimen, tuple[Pass, ...], Failure]]:
    """Programs on which the first pass that fails does so: those before it left out, if possible,
    and of fixed sizes, if possible.
    """
    for inputs in cases:
        for dynamic in (False, True):
            whole = specimen_of(program, inputs, dynamic=dynamic)
            for last in range(1, len(passes) + 1):
                failure = examine(whole, passes[:last])
                if failure is None:
                    continue
                if last > 1:  # on the program that the last pass gets
                    captured, alone = whole.capture(), tuple(passes[last - 1 : last])
                    named = captured.named(whole.inputs)
                    context = PassContext(calibration=(named,))
                    before, _ = run_on(captured.program, passes[: last - 1], context)
                    start = specimen_of(before, named, dynamic=dynamic)
                    found = examine(start, alone)
                    kind = failure.pass_name, failure.kind
                    if found is not None and (found.pass_name, found.kind) == kind:
                        yield start, alone, found
                        continue
                yield whole, tuple(passes[:last]), failure


def _shorten(search: Search) -> None:
    """Find an early node by which alone it fails: return that, and nothing after it."""
    names = [node.name for node in search.best.calls]
    whole, low, high = search.best, 0, len(names)
    while low < high and not search.is_over():
        middle = (low + high) // 2
        if search.accepts(whole.returning(names[middle])):
            high = middle
        else:
            low = middle + 1


def _cut_chunks(search: Search) -> None:
    """Make inputs of what runs of nodes give, long runs first."""
    size = max(1, len(search.best.calls) // 2)
    while not search.is_over():
        place = 0
        while place < len(names := [node.name for node in search.best.calls]):
            chunk = names[place : place + size]
            if len(chunk) == len(names) or search.is_over():
                break
            if not search.accepts(search.best.cut(chunk, search.best.values())):
                place += size
        if size == 1:
            return
        size //= 2


def _bypass(search: Search) -> None:
    """Put what a node reads in its place, where shape and dtype fit."""
    for name in [node.name for node in search.best.calls]:
        values = search.best.values()
        node = next((one for one in search.best.calls if one.name == name), None)
        for source in [] if node is None else node.all_input_nodes:
            before, after = values[source.name], values[name]
            if not isinstance(before, Tensor) or not isinstance(after, Tensor):
                continue
            is_alike = before.shape == after.shape and before.dtype == after.dtype
            if is_alike and search.accepts(search.best.bypassing(name, source.name)):
                break


def fails_alike(reduced: Reduced, specimen: Specimen) -> bool:
    """Whether another specimen fails in the same way."""
    with torch.no_grad():
        return reduced.failure.is_like(examine(specimen, reduced.passes))
