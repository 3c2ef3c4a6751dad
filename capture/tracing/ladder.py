"""The ladder: attempts to trace a model, as a list, each with what it is tried after.

    export      torch.export, not strict
    bake        the same, with predicates answered that depend on weights alone
    strict      torch.export, strict: Dynamo follows the bytecode
    bake        not strict again, and the values of small constants are known as well
    rewrite     control flow rewritten to torch.cond, while_loop, scan, torch.where
    specialise  one path taken, and outputs that tell whether it was the right one
    torchscript what the caller does when all of these refuse

Nothing below `export` is tried for a model that `export` takes in all its sizes, as eager runs it.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain

from torch import Tensor, nn

from enginecast.capture.control_flow.converters.restructure import restructure
from enginecast.capture.control_flow.detect.recorder import Read, record
from enginecast.capture.control_flow.operators.selections import noting_selections
from enginecast.capture.control_flow.operators.sites import Site
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.narrowing import Narrowed, equal, fewer, fix, in_steps, narrow, tie
from enginecast.capture.inputs.specs import InputSpec, named_dims
from enginecast.capture.outputs.flatten import Wanted
from enginecast.capture.python.locations import SourceLocation
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.sources.base.source import Source
from enginecast.capture.tracing.answers.possible_values import answering_certain
from enginecast.capture.tracing.answers.recorded_reads import (
    answering,
    baked_places,
    guarding,
    guards_of,
)
from enginecast.capture.tracing.answers.size_numbers import following_numbers, numbers_of
from enginecast.capture.tracing.answers.tracing_questions import (
    answering_all,
    answering_users,
)
from enginecast.capture.tracing.attempt import Around, Attempt, Fallback, RefusedError, Rung
from enginecast.capture.tracing.patches.table import knowing_constants
from enginecast.capture.tracing.sizes.look_alikes import FakeRuns
from enginecast.capture.tracing.sizes.shapes import FrozenDimensionError
from enginecast.capture.tracing.torch_export import WRONG_SIZES, Traced, trace
from enginecast.capture.tracing.unlike_eager import unlike_eager
from enginecast.errors import CaptureError

LEADS_ON = frozenset(
    {
        "data-dependent-branch",
        "data-dependent-size",
        "data-leaves-torch",
        "specialized-dimension",
    }
)
"""Kinds of refusals that another rung may help with."""
LEADS_TO_STRICT = frozenset(
    {"other-tensors", "scripted-part", "unsupported-python", "operator", "model-error"}
)
"""Kinds with which Dynamo may help: it follows the code of a subclass, or of what was scripted."""
RAISED = frozenset({"model-error", "operator"})
"""Kinds with which the model's code, or an operator that it calls, raised an error."""
START = frozenset({"start"})
"""Nothing was tried."""
NARROWED = frozenset({"narrowed"})
"""A plain trace was made, which takes fewer sizes than it might."""
UNLIKE_EAGER = frozenset({"unlike-eager"})
"""A trace was made, and the code can tell it from eager."""

OF_SIZES = frozenset({"specialized-dimension", *WRONG_SIZES})
"""Kinds for which it may matter that torch tells sizes of 1 from others."""

MOST_NARROWINGS = 6
"""How often a trace is tried again with narrower dimensions; each costs as much as the first."""
MOST_REWRITES = 8
"""How often code is rewritten for one more place; each costs a trace."""
LONGEST_SEARCH = 120.0
"""Seconds after which no further place is rewritten."""
SEED = 0
"""Of the example of a trace that is tried again."""
EVERY_FALLBACK: tuple[Fallback, ...] = ("none", "rewrite", "specialise", "torchscript")
MAY_REWRITE: tuple[Fallback, ...] = ("rewrite", "specialise", "torchscript")


@dataclass
class Search:
    """What is known of a model while attempts are made."""

    source: Source
    first: Attempt
    """The plain one."""
    wanted: Wanted
    cases: Callable[[], Sequence[Mapping[str, Tensor]]]
    """Makes inputs of different sizes; a specialised program goes the path of the first."""
    fallback: Fallback
    values: Mapping[str, range] = field(default_factory=dict)
    """The values that inputs may have, where they are few."""
    rungs: list[Rung] = field(default_factory=list)
    """What was tried, in order, for users; the last one is taken."""
    errors: list[CaptureError] = field(default_factory=list)
    taken: Traced | None = None
    _unlike: str | None = None

    @cached_property
    def runs(self) -> list[list[Read]]:
        """What Python reads of tensors when eager runs the cases."""
        with quiet_torch():
            return record(self.source.eager(), self.cases())

    @cached_property
    def baked(self) -> Attempt:
        """Answers what depends on weights alone, and what comes out the same for all values of
        inputs; follows numbers that buffers hold through what is computed from them and from sizes.
        Does nothing where there is none of these.
        """
        places = baked_places(self.runs)
        numbers = numbers_of(self.source.eager())
        effects: list[str] = []
        around: list[Around] = []
        if places:
            effects.append(f"depends on weights alone: {'; '.join(map(str, places))}")
            around.append(partial(answering, reads=self.runs[0], places=places))
        if numbers:
            effects.append(f"whole numbers in buffers are known: {', '.join(numbers)}")
            around.append(partial(following_numbers, known=numbers))
        answers: dict[SourceLocation, set[bool]] = {}
        for read in chain(*self.runs):
            if read.decides == "inputs" and isinstance(read.value, bool):
                answers.setdefault(read.place, set()).add(read.value)
        if self.values and any(len(each) == 1 for each in answers.values()):
            named = ", ".join(self.values)
            effects.append(f"tests with one answer for all values of {named} are answered")
            around.append(partial(answering_certain, known=self.values))
        return replace(self.first, name="bake", effect="; ".join(effects), around=tuple(around))

    def is_due(self, step: "Step") -> bool:
        """Whether an attempt is made for what the first was refused for, or for what the trace that
        was taken lacks.
        """
        if self.fallback not in step.fallbacks:
            return False
        if self.taken is None:
            return (_kind(self.errors[0]) if self.errors else "start") in step.after
        attempt = self.taken.attempt
        is_plain = attempt.name == "export" and not attempt.around
        if "narrowed" in step.after:
            return is_plain and bool(self.taken.narrowed)
        return "unlike-eager" in step.after and bool(self.unlike_eager)

    @property
    def unlike_eager(self) -> str:
        """Where the user's code does otherwise because it is traced; looked at once."""
        assert self.taken is not None
        if self._unlike is None:
            self._unlike = unlike_eager(self.source, self.taken, self.wanted)
        return self._unlike

    def take(self, traced: Traced) -> None:
        """Take a trace, in place of one that was taken before unless that lacks no more."""
        attempt = traced.attempt
        if self.taken is None:
            self.rungs.append(Rung(attempt.name, "taken", attempt.effect))
        elif self._unlike is not None:  # it is made for this
            if unlike_eager(self.source, traced, self.wanted):
                return
            self._unlike = ""
        else:
            refused = Rung("export", "refused", "; ".join(self.taken.narrowed))
            self.rungs[:] = [refused, Rung(attempt.name, "taken")]
        self.taken = traced


def _kind(error: CaptureError) -> str:
    if isinstance(error, RefusedError):
        return error.refusal.kind
    return "specialized-dimension" if isinstance(error, FrozenDimensionError) else ""


# The attempts, in the order in which they are made.


def plain(search: Search) -> Iterator[Attempt]:
    yield search.first


def for_all_sizes(search: Search) -> Iterator[Attempt]:
    """Code that goes through the rows of an input one by one is unrolled by a plain export, for one
    number of rows.  Only the user's own code is rewritten for this: a library's may well have a
    branch on sizes at every layer.
    """
    if restructure(search.source.empty()).functions:
        around = (answering_users,)  # no trace of rewritten code is compared with eager's operators
        yield replace(
            search.first, name="rewrite", around=around, rewrites=rewriting, narrows=False
        )


def answered_as_in_eager(search: Search) -> Iterator[Attempt]:
    effect = "code that asks whether it is traced is answered as in eager"
    yield replace(search.first, effect=effect, around=(answering_all,))


def strict(search: Search) -> Iterator[Attempt]:
    yield replace(search.first, name="strict", is_strict=True)


def baked(search: Search) -> Iterator[Attempt]:
    if search.baked.around:
        yield search.baked


def baked_with_constants(search: Search) -> Iterator[Attempt]:
    effect = "; ".join(filter(None, [search.baked.effect, "values of small constants are known"]))
    around = (*search.baked.around, knowing_constants)
    yield replace(search.baked, effect=effect, around=around)


def rewritten(search: Search) -> Iterator[Attempt]:
    """Functions that hold a place that was refused or reads inputs, and then, one after another,
    those that hold the places to which only rewritten code comes.

    The search is bounded: the rung says so where it ends early.
    """
    places = {read.place for run in search.runs for read in run if read.decides != "weights"}
    places |= {_split(rung.place) for rung in search.rungs if rung.place}
    answered, around = baked_places(search.runs), (*search.baked.around, answering_users)
    until = time.monotonic() + LONGEST_SEARCH
    for count in range(1, MOST_REWRITES + 1):
        rewrites = partial(rewriting, places=frozenset(places), answered=answered)
        yield replace(search.baked, name="rewrite", around=around, rewrites=rewrites)
        refused = search.rungs[-1]
        further = {_split(refused.place)} - places if refused.place else set()
        if not further or _kind(search.errors[-1]) not in LEADS_ON:
            return
        if count == MOST_REWRITES or time.monotonic() > until:
            times = "time" if count == 1 else "times"
            search.rungs[-1] = replace(
                refused,
                reason=f"{refused.reason} (rewritten {count} {times}, each for a place that the one"
                f" before came to; the search ends after {MOST_REWRITES} or {LONGEST_SEARCH:.0f} s,"
                " and what lies behind was not looked at)",
            )
            return
        search.rungs.pop()
        places |= further


def specialised(search: Search) -> Iterator[Attempt]:
    """Takes the path of one run; the program returns for which inputs that is right."""
    if search.runs:
        reads = search.runs[0]
        guards = guards_of(reads)
        places = dict.fromkeys(f"{guard.read.file}:{guard.read.line}" for guard in guards)
        effect = f"takes one path, and refuses inputs that want another: {'; '.join(places)}"
        around = (partial(guarding, reads=reads), answering_users)
        yield replace(search.first, name="specialise", effect=effect, around=around, guards=guards)


def users_code_as_eager(search: Search) -> Iterator[Attempt]:
    assert search.taken is not None
    taken = search.taken.attempt
    yield replace(taken, around=(*taken.around, answering_users))


@dataclass(frozen=True)
class Step:
    """Attempts, and when they are made."""

    after: frozenset[str]
    """States of the search: kinds of refusals of the first attempt, or what a trace lacks."""
    make: Callable[[Search], Iterator[Attempt]]
    """Each is made when the one before has failed."""
    fallbacks: tuple[Fallback, ...] = EVERY_FALLBACK
    """With which of them it is allowed."""
    is_silent: bool = False
    """Whether its refusal says nothing that the first one does not."""


ATTEMPTS = (
    Step(START, plain),
    Step(NARROWED, for_all_sizes, MAY_REWRITE),
    Step(RAISED, answered_as_in_eager, is_silent=True),
    Step(LEADS_ON, baked),
    Step(LEADS_ON | LEADS_TO_STRICT, strict),
    Step(LEADS_ON, baked_with_constants, is_silent=True),  # there may be no such constants at all
    Step(LEADS_ON, rewritten, MAY_REWRITE),
    Step(LEADS_ON, specialised, ("specialise",)),
    Step(UNLIKE_EAGER, users_code_as_eager),
)
"""Of an export, in order."""


def climb(search: Search) -> Traced:
    """The first trace that succeeds and lacks nothing, and what was tried up to it.

    Raises:
        RefusedError: nothing helped, or nothing can.
        CaptureError: a loop of the model does not end, or a size that was asked for cannot vary.
    """
    for step in filter(search.is_due, ATTEMPTS):
        for attempt in step.make(search):
            try:
                traced = in_sizes_that_hold(search, attempt)
            except CaptureError as error:
                if search.taken is None and not step.is_silent:
                    search.errors.append(error)
                    why, place = error.message, ""
                    if isinstance(error, RefusedError):
                        why, place = error.why, error.refusal.place
                    search.rungs.append(Rung(attempt.name, "refused", why, place))
            else:
                search.take(traced)
                break
    if search.taken is not None:
        return search.taken
    first = search.errors[0]
    if isinstance(first, RefusedError) and _kind(first) in LEADS_ON and len(search.rungs) > 1:
        raise RefusedError(first.refusal, search.rungs, search.runs) from first.__cause__
    raise first


def _split(place: str) -> SourceLocation:
    file, _, line = place.rpartition(":")
    return SourceLocation(file, int(line)).resolved


@contextmanager
def rewriting(
    module: nn.Module,
    places: Collection[SourceLocation] = (),
    answered: Collection[SourceLocation] = (),
) -> Iterator[list[Site]]:
    """Rewrite the functions that hold `places`, or all of the user's own."""
    restructured = restructure(module, sorted(places), answered)
    with restructured.active(), noting_selections():
        yield list(restructured.sites)


def in_sizes_that_hold(search: Search, attempt: Attempt) -> Traced:
    """Trace; where sizes are what is refused, also in others that nobody asked for.

    Raises:
        RefusedError: torch.export refused it.
        FrozenDimensionError: a dimension that the user asked for cannot vary.
    """
    waiting = [attempt]
    if attempt.name == "rewrite" and named_dims(attempt.specs):
        # torch knows that `n > 1`, and would leave out the path of 1.
        waiting.insert(0, replace(attempt, is_open=True))
    refusal: CaptureError | None = None
    while waiting:
        attempt = waiting.pop(0)
        try:
            return trace(search.source, attempt, search.wanted)
        except CaptureError as error:
            waiting[:0] = _in_other_sizes(search.source, attempt, error)
            if refusal is None or not attempt.is_open:
                refusal, specs = error, attempt.specs
    assert refusal is not None
    if isinstance(refusal, RefusedError):
        raise _advised(search.source, specs, refusal) from refusal.__cause__
    raise refusal


def _in_other_sizes(source: Source, attempt: Attempt, error: CaptureError) -> list[Attempt]:
    """The same attempt, where sizes may be the reason why it was refused: without asking which are
    1; with guards that torch could not prove; with narrower dimensions.
    """
    specs = attempt.specs
    if attempt.is_open:
        left = narrow(specs, str(error.__cause__)) if isinstance(error, RefusedError) else None
        is_left = left is not None and left.is_proved and not attempt.is_proved
        return [replace(attempt, is_proved=True)] if is_left else []
    others = []
    is_of_sizes = _kind(error) in OF_SIZES and isinstance(error, RefusedError)
    if is_of_sizes and not attempt.is_strict and named_dims(specs):
        others.append(replace(attempt, is_open=True, is_proved=False))
    fitted = _fitted(source, specs, error)
    if fitted is None or attempt.narrowings == MOST_NARROWINGS:
        return others
    if attempt.narrows or not fitted.notes:
        narrower = replace(
            attempt,
            specs=fitted.specs,
            inputs=sample(fitted.specs, example_sizes(fitted.specs), SEED),
            is_proved=attempt.is_proved or fitted.is_proved,
            narrowings=attempt.narrowings + 1,
            notes=(*attempt.notes, *fitted.notes),
        )
        others.append(narrower)
    return others


def _fitted(source: Source, specs: tuple[InputSpec, ...], error: CaptureError) -> Narrowed | None:
    """The inputs with dimensions that the refusal allows."""
    if isinstance(error, FrozenDimensionError):
        return tie(specs, error.names) or fix(specs, error.names)
    if isinstance(error, RefusedError) and error.refusal.kind in WRONG_SIZES:

        def takes(sizes: Mapping[str, int]) -> bool:
            return FakeRuns(source).shapes(sample(specs, sizes, SEED)) is not None

        found = equal(specs, takes) or in_steps(specs, takes, error.refusal.place)
        return found or fewer(specs, f"with a size that varies, {error.refusal.in_short}")
    place = error.refusal.place if isinstance(error, RefusedError) else ""
    return narrow(specs, str(error.__cause__), place)


def _advised(source: Source, specs: tuple[InputSpec, ...], error: RefusedError) -> RefusedError:
    """The refusal of sizes that the user asked for, with those that the code takes."""
    if not any(dim.asked for dim in named_dims(specs).values()):
        return error
    free = (replace(s, dims=tuple(replace(d, asked=False) for d in s.dims)) for s in specs)
    fitted = _fitted(source, tuple(free), error)
    found = [
        (f"{spec.name}:{index}", dim, new)
        for spec, fit in zip(specs, fitted.specs if fitted else specs, strict=True)
        for index, (dim, new) in enumerate(zip(spec.dims, fit.dims, strict=True))
        if new.name is not None
    ]
    tied = {new.name for _, dim, new in found if new.name != dim.name}
    if tied:
        advice = [f"{place}={new.name}:{new.shown}" for place, _, new in found if new.name in tied]
        what = "Give sizes that must be equal one name"
    else:
        changed = [
            (place, new) for place, dim, new in found if dim.asked and new.sizes != dim.sizes
        ]
        advice = [f"{place}={new.shown}" for place, new in changed]
        what = "Ask for sizes that it takes"
    if not advice:
        return error
    hint = f"{what}: --dynamic {','.join(advice)}."
    return RefusedError(replace(error.refusal, hint=hint), why=error.why)
