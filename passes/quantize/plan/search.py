"""Choose a form for each layer: the fastest plan whose simulated error stays within a limit.

Every layer starts in its fastest form that is within the limit alone.  A move takes one layer to a
more exact form, at last to no rounding at all: to the one that takes away most squared error for
what it costs in time and size (errors of layers are independent, so their squares add up).  Moves
are ordered by the same, and the plan after the first k of them is simulated as a whole.  The
smallest k that fits is searched between one that does not and one that does, until what is found
is close to the limit: a handful of runs, whatever the number of layers.
"""

import heapq
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

MOST_RUNS = 12
"""Whole simulations of a search, that of the fastest forms included."""
CLOSE = 0.9
"""Part of the limit from which on a plan is not searched further."""
SIZE = 1.0
"""Time that the size of a weight is worth: a byte as much as a product in fp32.  Who asks for int8
wants a small file, too: with less, layers that int8 products harm would be kept whole instead of
stored, and embeddings, which gain no time, would be kept first."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Option:
    """One form of a layer, as the search sees it."""

    error: float
    """What the layer alone does to the result, in any unit that is the same for all layers."""
    time: float
    """Of the layer in this form, in the same unit for all layers."""
    size: float = 0.0
    """Of its weight."""


@dataclass(frozen=True)
class Found(Generic[Key]):
    """The end of a search."""

    chosen: dict[Key, int]
    """For each layer the place of its form."""
    error: float
    """Of the whole plan."""
    first: float
    """Of the plan with every layer in its fastest form."""
    runs: int
    moves: int


def search(
    options: Mapping[Key, Sequence[Option]],
    simulate: Callable[[dict[Key, int]], float],
    limit: float,
    first: float,
    start: Mapping[Key, int],
) -> Found[Key]:
    """The fastest choice that fits.

    Args:
        options: for each layer its forms, fastest first; the last one is the layer as it is, which
            has no error.
        limit: that this error may have.
        first: the error with every layer in its fastest form.
        start: for each layer the first form that is worth a try.
    """
    fastest = dict.fromkeys(options, 0)
    if first <= limit:
        return Found(fastest, first, first, 1, 0)
    start = dict(start)
    moves = list(_moves(options, start))
    failing, fits, error, runs = 0 if start == fastest else -1, len(moves), 0.0, 1
    guess = _guess(options, start, moves, first, limit)
    while fits - failing > 1 and runs < MOST_RUNS and error < CLOSE * limit:
        at = guess if failing < guess < fits else (failing + fits) // 2
        found, guess, runs = simulate(start | dict(moves[:at])), -1, runs + 1
        if found <= limit:
            fits, error = at, found
        else:
            failing = at
    return Found(start | dict(moves[:fits]), error, first, runs, fits)


def _moves(
    options: Mapping[Key, Sequence[Option]], start: Mapping[Key, int]
) -> Iterator[tuple[Key, int]]:
    """(layer, place of its next form), those that take away most error for their time first."""
    waiting: list[tuple[float, int, int]] = []
    keys = list(options)

    def push(number: int, place: int) -> None:
        forms = options[keys[number]]
        if place < len(forms) - 1:
            ratio = _worth(forms[place], forms[_next(forms, place)])
            heapq.heappush(waiting, (-ratio, number, place))

    for number, key in enumerate(keys):
        push(number, start[key])
    while waiting:
        _, number, place = heapq.heappop(waiting)
        following = _next(options[keys[number]], place)
        yield keys[number], following
        push(number, following)


def _next(forms: Sequence[Option], place: int) -> int:
    """The later form that takes away most error for its time; the last one takes all of it."""
    last = len(forms) - 1
    better = [at for at in range(place + 1, last) if forms[at].error < forms[place].error]
    return max([*better, last], key=lambda at: _worth(forms[place], forms[at]))


def _worth(form: Option, following: Option) -> float:
    """Squared error that goes for each unit of time."""
    lost = following.time - form.time + SIZE * (following.size - form.size)
    # At no cost at all it would be worth infinitely much, and then errors would not count.
    return (form.error**2 - following.error**2) / max(lost, 1e-3 * form.time)


def _guess(
    options: Mapping[Key, Sequence[Option]],
    start: Mapping[Key, int],
    moves: Sequence[tuple[Key, int]],
    first: float,
    limit: float,
) -> int:
    """After how many moves the sum of squares says that it fits."""
    wanted = sum(forms[0].error ** 2 for forms in options.values()) * (limit / first) ** 2
    squares = {key: forms[start[key]].error ** 2 for key, forms in options.items()}
    total = sum(squares.values())
    for count, (key, place) in enumerate(moves, start=1):
        total += options[key][place].error ** 2 - squares[key]
        squares[key] = options[key][place].error ** 2
        if total <= wanted:
            return count
    return len(moves)
