"""Narrow dimensions that nobody asked for to what the model's code takes.

A default range is a guess.  Where the code of a model takes another path at some size, or unrolls
a loop over a dimension, torch.export refuses the guess and says which sizes it cannot vouch for;
the guess is then narrowed, or the dimension fixed, which is reported.  A range that was given
with --dynamic is never touched: there the refusal is the answer.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from enginecast.capture.inputs.specs import (
    BATCH,
    SEQUENCE,
    DimSpec,
    InputSpec,
    named_dims,
    with_example_sizes,
)
from enginecast.capture.refusals.refusal import CONSTANT, GUARD, SIZE

FIXED = {BATCH: 1, SEQUENCE: 16}
"""Sizes of dimensions that must be fixed where no inputs were given; with given ones they keep the
size they have there, and others the size they were traced with."""

MOST_TRIALS = 100_000
"""Sizes that a guard is tried on before it counts as unproved."""

_SUGGESTED = re.compile(r"^\s+(?P<name>\w+) = (?P<fix>.+)$", re.MULTILINE)
_DIM = re.compile(r"Dim\('\w+'(?:, min=(?P<low>\d+))?(?:, max=(?P<high>\d+))?\)")
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
    """What was narrowed, as sentences for the user."""
    is_proved: bool = False
    """Whether torch only lacked a proof: what it asked holds for every size there is."""


def narrow(specs: tuple[InputSpec, ...], message: str, place: str = "") -> Narrowed | None:
    """Narrow what torch.export names in `message`.

    Args:
        specs: the inputs as they were traced.
        message: of the error.
        place: FILE:LINE of the code that does not take all sizes, where it is known.

    Returns:
        None when the message names no dimension, or one that the user asked for.  What holds for
        all sizes is not a reason to narrow anything: torch then defers its check (`is_proved`).
    """
    dims = named_dims(specs)
    guards = _guards(specs, message)
    if guards and "Suggested fixes:" not in message and all(_is_true(g, dims) for _, g in guards):
        return Narrowed(specs, (), is_proved=True)
    ranges = _ranges(dims, guards, message)
    if not ranges or any(dims[name].asked for name in ranges):
        return None
    changed = {name: new for name, new in ranges.items() if new != _bounds(dims[name])}
    return _narrowed(specs, changed, place) if changed else None


def fix(specs: tuple[InputSpec, ...], names: tuple[str, ...]) -> Narrowed | None:
    """Fix dimensions that cannot vary; None when the user asked for one of them to."""
    dims = named_dims(specs)
    if any(dims[name].asked for name in names):
        return None
    sizes = {name: _fixed_size(dims[name]) for name in names}
    return _narrowed(specs, {name: (size, size) for name, size in sizes.items()})


def fewer(specs: tuple[InputSpec, ...], because: str) -> Narrowed | None:
    """Let one dimension less vary: the last of those that share a name, then the rest of them.

    A default takes equal leading sizes for one batch, which weights among the inputs do not have.
    """
    for index in reversed(range(len(specs))):
        spec = specs[index]
        guesses = [n for n, dim in enumerate(spec.dims) if dim.name is not None and not dim.asked]
        if not guesses:
            continue
        axis = guesses[-1]
        size = spec.dims[axis].given or _fixed_size(spec.dims[axis])
        dims = (*spec.dims[:axis], DimSpec.static(size), *spec.dims[axis + 1 :])
        changed = (*specs[:index], replace(spec, dims=dims), *specs[index + 1 :])
        note = (
            f"dimension {axis} of {spec.name} is fixed at {size}: {because}; "
            f"--dynamic {spec.name}:{axis}=MIN..MAX lets it vary"
        )
        return Narrowed(with_example_sizes(changed), (note,))
    return None


def _guards(specs: tuple[InputSpec, ...], message: str) -> list[tuple[str, str]]:
    """(dimension, guard in the names of dimensions) for each guard that torch cannot vouch for."""
    by_place = {
        (spec.name, index): dim.name or str(dim.size)
        for spec in specs
        for index, dim in enumerate(spec.dims)
    }
    return [
        (
            match["name"],
            SIZE.sub(lambda m: by_place.get((m["input"], int(m["dim"])), "?"), match["guard"]),
        )
        for match in GUARD.finditer(message)
    ]


def _is_true(guard: str, dims: Mapping[str, DimSpec]) -> bool:
    """Whether a guard holds for every size of the dimensions it names: of each alone, or of two."""
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
) -> dict[str, tuple[int, int]]:
    """New bounds of the dimensions that a message names."""
    constant = {match["name"] for match in CONSTANT.finditer(message)}
    ranges: dict[str, tuple[int, int]] = {}
    _, _, suggested = message.partition("Suggested fixes:")
    for match in _SUGGESTED.finditer(suggested):
        found = _DIM.fullmatch(match["fix"])
        if match["name"] in dims and found is not None:
            dim = dims[match["name"]]
            low, high = int(found["low"] or 0), int(found["high"] or dim.maximum)
            ranges[match["name"]] = max(low, dim.minimum), min(high, dim.maximum)
        else:
            constant.add(match["name"])
    ranges |= {n: (size, size) for n in dims if n in constant for size in [_fixed_size(dims[n])]}
    suggestions = set(ranges)  # of a guard with a suggestion, torch adds a lower bound of 2
    for name, guard in guards:
        if name in dims and name not in suggestions:
            low, high = ranges.get(name, _bounds(dims[name]))
            ranges[name] = _allowed(replace(dims[name], minimum=low, maximum=high), guard)
    return ranges


def _allowed(dim: DimSpec, guard: str) -> tuple[int, int]:
    """The longest run of sizes around the traced one for which a guard holds.

    A guard that mentions other dimensions as well, or that cannot be read, allows one size.
    """
    try:
        code = compile(guard, "<guard>", "eval")
        if not set(code.co_names) <= {dim.name, *_FUNCTIONS}:
            raise NameError(guard)
        low = high = dim.size
        while low > dim.minimum and _holds(code, {str(dim.name): low - dim.step}):
            low -= dim.step
        while high < dim.maximum and _holds(code, {str(dim.name): high + dim.step}):
            high += dim.step
    except (SyntaxError, NameError, TypeError, ArithmeticError):
        low = high = _fixed_size(dim)
    return low, high


def _holds(code: CodeType, sizes: dict[str, int]) -> bool:
    return bool(eval(code, {"__builtins__": {}, **_FUNCTIONS}, sizes))


def _bounds(dim: DimSpec) -> tuple[int, int]:
    return dim.minimum, dim.maximum


def _fixed_size(dim: DimSpec) -> int:
    wanted = FIXED.get(str(dim.name), dim.size) if dim.given is None else dim.given
    return dim.fit(wanted)


def _narrowed(
    specs: tuple[InputSpec, ...], ranges: Mapping[str, tuple[int, int]], line: str = ""
) -> Narrowed:
    def changed(dim: DimSpec) -> DimSpec:
        if dim.name is None or dim.name not in ranges:
            return dim
        low, high = ranges[dim.name]
        return DimSpec.static(low) if low == high else replace(dim, minimum=low, maximum=high)

    notes = tuple(_note(specs, name, low, high, line) for name, (low, high) in ranges.items())
    found = (replace(spec, dims=tuple(map(changed, spec.dims))) for spec in specs)
    return Narrowed(with_example_sizes(tuple(found)), notes)


def _note(specs: tuple[InputSpec, ...], name: str, low: int, high: int, line: str) -> str:
    code = f"this model's code ({line})" if line else "this model's code"
    place, dim = next(
        (f"{spec.name}:{index}", dim)
        for spec in specs
        for index, dim in enumerate(spec.dims)
        if dim.name == name
    )
    if low == high:
        return (
            f"{name} is fixed at {low}: {code} cannot be captured with a size that varies; "
            f"--dynamic {place}=K fixes another one"
        )
    return (
        f"{name} takes {low}..{high}, not {dim.minimum}..{dim.maximum}: at other sizes {code} "
        f"does something else; --dynamic {place}={low}..{high} says so"
    )
