"""Narrow dimensions that the user did not set to the sizes that the model's code accepts.

A default range is a guess. If a model's code takes another path at some size, or unrolls a loop
over a dimension, torch.export rejects the guess and names the sizes it cannot guarantee; the guess
is then narrowed, or the dimension fixed, which is reported. A range given with --dynamic is never
changed: there the refusal is the result.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.capture.inputs.specs import (
    BATCH,
    SEQUENCE,
    DimSpec,
    InputSpec,
    dim_place,
    named_dims,
    with_example_sizes,
)
from enginecast.capture.refusals.explain import CONSTANT, SIZE, guards_in

FIXED = {BATCH: 1, SEQUENCE: 16}
"""Sizes of dimensions that must be fixed, if no inputs were given; with given inputs they keep
their size, and others the size they were traced with."""

STEPS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)
"""Step sizes to try if a model's code does not accept all sizes."""
MOST_TRIALS = 100_000
"""Most sizes that a guard is evaluated for before it counts as unproved."""

_SUGGESTED = re.compile(r"^\s+(?P<name>\w+) = (?P<fix>.+)$", re.MULTILINE)
_DIM = re.compile(r"Dim\('\w+'(?:, min=(?P<low>\d+))?(?:, max=(?P<high>\d+))?\)")
_STEPS = re.compile(r"(\d+)\*_\w+")
_FUNCTIONS: dict[str, Any] = {
    "max": max,
    "min": min,
    "Max": max,
    "Min": min,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "Eq": lambda a, b: a == b,
    "Ne": lambda a, b: a != b,
}


@dataclass(frozen=True)
class Narrowed:
    """Inputs with narrower dimensions."""

    specs: tuple[InputSpec, ...]
    notes: tuple[str, ...]
    """Notes for the user on what was narrowed."""
    is_proved: bool = False
    """Whether torch only lacked a proof: its guard holds for every size in range."""


def narrow(specs: tuple[InputSpec, ...], message: str, place: str = "") -> Narrowed | None:
    """Narrow what torch.export names in `message`.

    Args:
        specs: the inputs as traced.
        message: torch's error message.
        place: FILE:LINE of the code that rejects some sizes, if known.

    Returns:
        None if the message names no dimension, or one that the user asked for.  What holds for
        all sizes is not a reason to narrow anything: torch then defers its check (`is_proved`).
    """
    dims = named_dims(specs)
    # (dimension, guard over dimension names) for each guard that torch cannot guarantee.
    by_place = {
        (spec.name, index): dim.name or str(dim.size)
        for spec in specs
        for index, dim in enumerate(spec.dims)
    }
    guards = [
        (
            match["name"],
            SIZE.sub(lambda m: by_place.get((m["input"], int(m["dim"])), "?"), match["guard"]),
        )
        for match in guards_in(message)
    ]
    if guards and "Suggested fixes:" not in message and all(_is_true(g, dims) for _, g in guards):
        return Narrowed(specs, (), is_proved=True)
    _, _, suggested = message.partition("Suggested fixes:")
    equal = ((m["fix"], m["name"]) for m in _SUGGESTED.finditer(suggested))
    pair = next((pair for pair in equal if dims.keys() >= set(pair)), ())
    if pair and (tied := tie(specs, pair)):
        return tied
    ranges = _ranges(dims, guards, message)
    if not ranges or any(dims[name].asked for name in ranges):
        return None
    changed = {
        name: _with_given(dims[name], new)
        for name, new in ranges.items()
        if new != dims[name].sizes
    }
    return _narrowed(specs, changed, place) if changed else None


def _with_given(dim: DimSpec, sizes: range) -> range:
    """The sizes, or the size of the user's inputs if it is not among them."""
    return sizes if dim.given is None or dim.given in sizes else range(dim.given, dim.given + 1)


def fix(specs: tuple[InputSpec, ...], names: tuple[str, ...]) -> Narrowed | None:
    """Fix dimensions that cannot vary; None if the user asked for one of them to vary."""
    dims = named_dims(specs)
    if any(dims[name].asked for name in names):
        return None
    sizes = {name: _fixed_size(dims[name]) for name in names}
    return _narrowed(specs, {name: range(size, size + 1) for name, size in sizes.items()})


def tie(specs: tuple[InputSpec, ...], names: tuple[str, ...]) -> Narrowed | None:
    """Make one dimension of two that must be equal; None if the user asked for one of them."""
    dims = named_dims(specs)
    if len(names) != 2 or any(dims[name].asked for name in names):
        return None
    first, second = names
    both = _both(dims[first], dims[second])

    def tied(dim: DimSpec) -> DimSpec:
        return both if both is not None and dim.name in names else dim

    found = (replace(spec, dims=tuple(map(tied, spec.dims))) for spec in specs)
    note = f"{second} is {first}: this model's code needs them to be equal"
    return Narrowed(with_example_sizes(tuple(found)), (note,)) if both is not None else None


def _both(one: DimSpec, other: DimSpec) -> DimSpec | None:
    """A dimension of the sizes that two have in common; None where there are fewer than two."""
    low, high = max(one.minimum, other.minimum), min(one.maximum, other.maximum)
    common = replace(one, minimum=low, maximum=high, step=math.lcm(one.step, other.step))
    return common if len(common.sizes) > 1 else None


def equal(
    specs: tuple[InputSpec, ...], takes: Callable[[Mapping[str, int]], bool]
) -> Narrowed | None:
    """Make one dimension of two of which the code takes equal sizes alone, where it raised an error
    at others; None if no two dimensions are like that, or if the user asked for one of them.

    Args:
        takes: whether the model's code accepts inputs of these sizes.
    """
    dims = named_dims(specs)
    given = {name: dim.size for name, dim in dims.items()}
    for first, second in itertools.combinations(dims, 2):
        both = _both(dims[first], dims[second])
        sizes = [] if both is None else [*both.sizes[:2], both.sizes[-1]]
        if sizes and all(takes({**given, first: size, second: size}) for size in sizes):
            return tie(specs, (first, second))
    return None


def in_steps(
    specs: tuple[InputSpec, ...], takes: Callable[[Mapping[str, int]], bool], place: str
) -> Narrowed | None:
    """Let sizes vary in the smallest steps that the code accepts, such as for a size that is halved
    and doubled; None if no step helps, or if the user asked for the sizes.

    Args:
        takes: whether the model's code accepts inputs of these sizes.
        place: FILE:LINE of the code that rejects some sizes.
    """
    dims = named_dims(specs)
    names = [name for name, dim in dims.items() if name not in FIXED and dim.step == 1]
    for step in STEPS if names else ():
        steps = dict.fromkeys(names, step)
        if not _take(takes, dims, steps):
            continue
        for name in names:
            alone = {**steps, name: 1}
            steps = alone if _take(takes, dims, alone) else steps
        ranges = {n: _multiples(dims[n], size) for n, size in steps.items() if size > 1}
        ranges = {name: _with_given(dims[name], sizes) for name, sizes in ranges.items()}
        is_possible = ranges and not any(dims[name].asked for name in ranges)
        return _narrowed(specs, ranges, place) if is_possible else None
    return None


def _take(
    takes: Callable[[Mapping[str, int]], bool],
    dims: Mapping[str, DimSpec],
    steps: Mapping[str, int],
) -> bool:
    """Whether some sizes in steps are accepted, including the smallest."""
    sizes = {name: _multiples(dims[name], step) for name, step in steps.items()}
    if not all(sizes.values()):
        return False
    places = [(0, 0), (1, 1), (2, 3), (3, 2), (-1, -1)]
    tried = [
        {
            name: each[min(place[index % 2], len(each) - 1)]
            for index, (name, each) in enumerate(sizes.items())
        }
        for place in places
    ]
    return all(takes({**{n: dim.size for n, dim in dims.items()}, **each}) for each in tried)


def _multiples(dim: DimSpec, step: int) -> range:
    """The sizes that are multiples of a step."""
    step = math.lcm(step, dim.step)
    return range(dim.minimum + -dim.minimum % step, dim.maximum + 1, step)


def fewer(specs: tuple[InputSpec, ...], because: str) -> Narrowed | None:
    """Let one dimension fewer vary: first the last of those that share a name, then the others.

    By default, equal leading sizes are taken for one batch, which is wrong for weights among the
    inputs.
    """
    for index in reversed(range(len(specs))):
        spec = specs[index]
        guesses = [
            n
            for n, dim in enumerate(spec.dims)
            if dim.name is not None and not dim.asked and not dim.parts
        ]
        if not guesses:
            continue
        axis = guesses[-1]
        size = spec.dims[axis].given or _fixed_size(spec.dims[axis])
        dims = (*spec.dims[:axis], DimSpec.static(size), *spec.dims[axis + 1 :])
        changed = (*specs[:index], replace(spec, dims=dims), *specs[index + 1 :])
        text = (
            f"dimension {axis} of {spec.name} is fixed at {size}: {because}; "
            f"--dynamic {spec.name}:{axis}=MIN..MAX lets it vary"
        )
        note = Downgraded(text, "sizes", f"--dynamic {spec.name}:{axis}={size}")
        return Narrowed(with_example_sizes(changed), (note,))
    return None


def _is_true(guard: str, dims: Mapping[str, DimSpec]) -> bool:
    """Whether a guard holds for all sizes of the one or two dimensions it names."""
    try:
        code = compile(guard, "<guard>", "eval")
        names = [name for name in dims if name in code.co_names]
        if not set(code.co_names) <= {*names, *_FUNCTIONS} or len(names) > 2:
            return False
        sizes = [dims[name].sizes for name in names]
        if math.prod(map(len, sizes)) > MOST_TRIALS:
            return False
        trials = itertools.product(*sizes)
        return all(_holds(code, dict(zip(names, trial, strict=True))) for trial in trials)
    except (SyntaxError, TypeError, ArithmeticError):
        return False


def _ranges(
    dims: Mapping[str, DimSpec], guards: Sequence[tuple[str, str]], message: str
) -> dict[str, range]:
    """New ranges of the dimensions that a message names."""
    constant = {match["name"] for match in CONSTANT.finditer(message)}
    ranges: dict[str, range] = {}
    _, _, suggested = message.partition("Suggested fixes:")
    for match in _SUGGESTED.finditer(suggested):
        found = _DIM.fullmatch(match["fix"])
        step = _STEPS.fullmatch(match["fix"])
        dim = dims.get(match["name"])
        if dim is not None and found is not None:
            low, high = int(found["low"] or 0), int(found["high"] or dim.maximum)
            ranges[match["name"]] = range(max(low, dim.minimum), min(high, dim.maximum) + 1)
        elif dim is not None and step is not None:
            ranges[match["name"]] = _multiples(dim, int(step[1]))
        else:
            constant.add(match["name"])
    fixed = {name: _fixed_size(dim) for name, dim in dims.items() if name in constant}
    ranges |= {name: range(size, size + 1) for name, size in fixed.items()}
    suggestions = set(ranges)  # of a guard with a suggestion, torch adds a lower bound of 2
    for name, guard in guards:
        if name in dims and name not in suggestions:
            ranges[name] = _allowed(dims[name], ranges.get(name, dims[name].sizes), guard)
    return ranges


def _allowed(dim: DimSpec, sizes: range, guard: str) -> range:
    """The longest run of sizes around the traced one for which a guard holds; in steps, if the
    adjacent sizes break it.

    A guard that mentions other dimensions as well, or that cannot be read, allows one size.
    """
    try:
        code = compile(guard, "<guard>", "eval")
        if not set(code.co_names) <= {dim.name, *_FUNCTIONS}:
            raise NameError(guard)
        holding = [n for n in sizes[:MOST_TRIALS] if _holds(code, {str(dim.name): n})]
    except (SyntaxError, NameError, TypeError):
        holding = []
    whole, *stepped = (_run(dim.size, set(holding), sizes.step * k) for k in (1, *STEPS))
    best = whole if len(whole) > 1 else max(stepped, key=len)
    size = _fixed_size(dim)
    return best if len(best) > 1 else range(size, size + 1)


def _run(size: int, holding: Set[int], step: int) -> range:
    """The consecutive multiples of a step around a size; empty if the size is not a multiple."""
    if size % step or size not in holding:
        return range(0)
    low = high = size
    while low - step in holding:
        low -= step
    while high + step in holding:
        high += step
    return range(low, high + 1, step)


def _holds(code: CodeType, sizes: dict[str, int]) -> bool:
    try:
        return bool(eval(code, {"__builtins__": {}, **_FUNCTIONS}, sizes))
    except ArithmeticError:
        return False


def _fixed_size(dim: DimSpec) -> int:
    wanted = FIXED.get(str(dim.name), dim.size) if dim.given is None else dim.given
    return dim.fit(wanted)


def _narrowed(
    specs: tuple[InputSpec, ...], ranges: Mapping[str, range], line: str = ""
) -> Narrowed:
    def changed(dim: DimSpec) -> DimSpec:
        if dim.name is None or dim.name not in ranges:
            return dim
        return _of_sizes(dim, ranges[dim.name])

    notes = tuple(_note(specs, name, sizes, line) for name, sizes in ranges.items())
    found = (replace(spec, dims=tuple(map(changed, spec.dims))) for spec in specs)
    return Narrowed(with_example_sizes(tuple(found)), notes)


def _of_sizes(dim: DimSpec, sizes: range) -> DimSpec:
    if len(sizes) == 1:
        return DimSpec.static(sizes[0])
    return replace(dim, minimum=sizes[0], maximum=sizes[-1], step=sizes.step)


def _note(specs: tuple[InputSpec, ...], name: str, sizes: range, line: str) -> Downgraded:
    code = f"this model's code ({line})" if line else "this model's code"
    place, dim = dim_place(specs, name), named_dims(specs)[name]
    new = _of_sizes(dim, sizes).shown
    text = (
        f"{name} takes {new}, not {dim.shown}: at other sizes {code} takes another path; "
        f"--dynamic {place}={new} sets this range"
    )
    if len(sizes) == 1:
        text = (
            f"{name} is fixed at {new}: {code} cannot be captured with a size that varies; "
            f"--dynamic {place}=K fixes another one"
        )
    return Downgraded(text, "sizes", f"--dynamic {place}={new}")
