"""What the user says of inputs: `--inputs FILE.safetensors`, `--prompts FILE.txt`,
`--values NAME=MIN..MAX`, and `--dynamic` with one or more of these, between commas:

    NAME:DIM=MIN..MAX               a range
    NAME:DIM=MIN..MAX/STEP          every STEP-th size of it
    NAME:DIM=K                      a fixed size
    NAME:DIM=SYMBOL:MIN..MAX        a range with a name
    NAME:DIM=SYMBOL                 the size that has this name

Importing it does not import torch: the command line refuses bad files and texts before.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from enginecast.errors import InputError, UsageError
from enginecast.runtime.prompts import read_prompts

if TYPE_CHECKING:
    from torch import Tensor

    from enginecast.capture.inputs.specs import DimSpec, InputSpec

FORM = re.compile(
    r"(?P<input>[^:=]+):(?P<dim>\d+)=(?=.)(?P<symbol>[A-Za-z_]\w*)?"
    r"(?:(?(symbol):)(?P<minimum>\d+)(?:\.\.(?P<maximum>\d+)(?:/(?P<step>\d+))?)?)?"
)
VALUES = re.compile(r"(?P<input>[^:=]+)=(?P<low>-?\d+)\.\.(?P<high>-?\d+)")
IMAGE_AXES = {2: "height", 3: "width"}


def require_inputs(path: Path) -> None:
    """Read the names in a safetensors file.

    Raises:
        UsageError: the file is missing, broken or empty.
    """
    try:
        with safe_open(path, "numpy") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--inputs {path} cannot be read as safetensors: {error}") from error
    if not names:
        raise UsageError(f"--inputs {path} holds no tensor")


def read_inputs(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file that holds one tensor per input, by argument name.

    Raises:
        UsageError: the file is missing, broken or empty.
    """
    from safetensors.torch import load_file

    require_inputs(path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--inputs {path} cannot be read as safetensors: {error}") from error
    return tensors


_from_pipes: dict[tuple[int, int, int] | None, list[str]] = {}
"""Prompts by the pipe that they came through, and when: it gives them only once."""


def given_prompts(path: Path) -> list[str]:
    """One prompt per line, read as by `enginecast run`; from a pipe only the first time.

    Raises:
        UsageError: the file is missing, no UTF-8, or empty.
    """
    try:
        known = _from_pipes.get(_pipe_at(path))
        if known is None:
            known = read_prompts(path)
            if (pipe := _pipe_at(path)) is not None:  # after the last that was written to it
                _from_pipes[pipe] = known
        return known
    except InputError as error:
        raise UsageError(
            f"--prompts {error.message}", hint="Write one prompt per line, in UTF-8."
        ) from error


def _pipe_at(path: Path) -> tuple[int, int, int] | None:
    """Which pipe a path leads to, and when it was last written to; None: it can be read again."""
    try:
        found = path.stat()
    except OSError:
        return None
    is_pipe = not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode)
    return (found.st_dev, found.st_ino, found.st_mtime_ns) if is_pipe else None


class GuessedRange(str):
    """A text of `--dynamic` whose range nobody asked for: it is narrowed to the sizes that the
    model's code takes, as a default one is.
    """


class ProfileRange(str):
    """A text of `--dynamic` that stands for the sizes of `--profile`: it gives way to one that the
    user wrote, and joins those of other profiles.
    """


@dataclass(frozen=True)
class DynamicOption:
    """One option, parsed: sizes for dimension `dim` of `input`."""

    input: str
    dim: int
    minimum: int
    maximum: int
    """0: as for other dimensions with its symbol."""
    text: str
    """As the user wrote it, for messages."""
    step: int = 1
    symbol: str = ""
    is_guess: bool = False
    """See `GuessedRange`."""
    is_profile: bool = False
    """See `ProfileRange`."""

    @property
    def said(self) -> str:
        """As the user wrote it, with its option."""
        return f"--profile ({self.text})" if self.is_profile else f"--dynamic {self.text}"

    @property
    def is_static(self) -> bool:
        return self.minimum == self.maximum > 0

    @property
    def place(self) -> tuple[str, int]:
        return self.input, self.dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.minimum, self.maximum, self.step


def parse_dynamic(text: str) -> DynamicOption:
    """Parse one of the forms that the module lists.

    Raises:
        UsageError: the text has another form, a largest size below 1, an empty range, or ends that
            are not multiples of its step.
    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--dynamic {text}: expected NAME:DIM=MIN..MAX, NAME:DIM=MIN..MAX/STEP, NAME:DIM=K or "
            "NAME:DIM=SYMBOL",
            hint="For example --dynamic input_ids:1=1..512; dimensions count from 0.",
        )
    minimum = int(match["minimum"] or 0)
    maximum = int(match["maximum"] or minimum)
    step = int(match["step"] or 1)
    if match["minimum"] and not (minimum <= maximum and maximum):
        raise UsageError(f"--dynamic {text}: expected MIN <= MAX, and a MAX of at least 1")
    if step < 1 or minimum % step or maximum % step:
        raise UsageError(f"--dynamic {text}: expected MIN and MAX that are multiples of STEP")
    place = match["input"], int(match["dim"])
    symbol, is_guess = match["symbol"] or "", isinstance(text, GuessedRange)
    of = isinstance(text, ProfileRange)
    return DynamicOption(*place, minimum, maximum, text.strip(), step, symbol, is_guess, of)


def apply_dynamic(
    specs: tuple[InputSpec, ...], options: Sequence[DynamicOption]
) -> tuple[InputSpec, ...]:
    """Set the ranges of dimensions; a shared name changes in all inputs.

    Raises:
        UsageError: no such input or dimension, or two options that contradict each other.
    """
    from enginecast.capture.inputs.specs import with_example_sizes

    specs = _with_symbols(specs, options)
    seen: dict[tuple[str, int], DynamicOption] = {}
    changed = specs
    for option in _joined(specs, [option for option in options if option.maximum]):
        places = _places(specs, option)
        for place in places:
            earlier = seen.setdefault(place, option)
            if earlier.sizes != option.sizes:
                raise UsageError(
                    f"{option.said} contradicts {earlier.said}: both set the same dimension"
                )
        changed = tuple(_changed(spec, places, option) for spec in changed)
    return with_example_sizes(changed)


def _joined(
    specs: tuple[InputSpec, ...], options: Sequence[DynamicOption]
) -> Iterator[DynamicOption]:
    """Options with those of profiles joined, by the dimensions that they set."""
    written = [option for option in options if not option.is_profile]
    yield from written
    taken = {place for option in written for place in _places(specs, option)}
    joined: dict[tuple[str, int], DynamicOption] = {}
    for option in options:
        first, *_ = _places(specs, option)
        if not option.is_profile or first in taken:
            continue
        before = joined.get(first, option)
        least, most = min(before.minimum, option.minimum), max(before.maximum, option.maximum)
        joined[first] = replace(option, minimum=least, maximum=most)
    yield from joined.values()


def _with_symbols(
    specs: tuple[InputSpec, ...], options: Sequence[DynamicOption]
) -> tuple[InputSpec, ...]:
    """The inputs with dimensions renamed to the user's symbols.

    A name that several inputs share is renamed everywhere, even if the user renamed it in one
    place.
    """
    named = {option.place: option for option in options if option.symbol}
    symbols = {place: option.symbol for place, option in named.items()}
    for option in named.values():
        symbols = dict.fromkeys(_places(specs, option), option.symbol) | symbols
    dims = {(s.name, index): dim for s in specs for index, dim in enumerate(s.dims)}
    called = {place: symbols.get(place, dim.name) for place, dim in dims.items()}
    found: dict[str, list[DimSpec]] = {}
    for place, name in called.items():
        if name is not None:
            found.setdefault(name, []).append(dims[place])
    for option in options:
        if option.symbol:
            _check_symbol(option, found[option.symbol], options)
    new = {
        place: replace(_widest(found[name]), name=name)
        for place, name in called.items()
        if name is not None and name in symbols.values()
    }
    return tuple(
        replace(s, dims=tuple(new.get((s.name, index), dim) for index, dim in enumerate(s.dims)))
        for s in specs
    )


def _check_symbol(
    option: DynamicOption, dims: Sequence[DimSpec], options: Sequence[DynamicOption]
) -> None:
    """Refuse a symbol without a range, and one shared by dimensions of different sizes in the
    example.
    """
    has_range = any(other.maximum for other in options if other.symbol == option.symbol)
    if not has_range and all(dim.name is None for dim in dims):
        raise UsageError(
            f"--dynamic {option.text}: {option.symbol} has no range",
            hint=f"Give it one: --dynamic {option.input}:{option.dim}={option.symbol}:MIN..MAX.",
        )
    given = {dim.size if dim.name is None else dim.given for dim in dims} - {None}
    if len(given) > 1:
        shown = " and ".join(map(str, sorted(size for size in given if size is not None)))
        raise UsageError(
            f"--dynamic {option.text}: the inputs have {shown} in dimensions called {option.symbol}"
        )


def _widest(dims: Sequence[DimSpec]) -> DimSpec:
    """The representative of dimensions with one name: the first that may vary."""
    return next((dim for dim in dims if dim.name is not None), dims[0])


def _places(specs: tuple[InputSpec, ...], option: DynamicOption) -> list[tuple[str, int]]:
    """Input and index of the named dimension, and of those that share its name."""
    spec = next((spec for spec in specs if spec.name == option.input), None)
    if spec is None:
        names = ", ".join(spec.name for spec in specs)
        raise UsageError(f"{option.said}: no input {option.input!r}; expected one of {names}")
    if option.dim >= len(spec.dims):
        raise UsageError(f"{option.said}: {spec.name} has dimensions 0 to {len(spec.dims) - 1}")
    target = spec.dims[option.dim]
    if target.name is None:
        return [option.place]
    return [
        (spec.name, index)
        for spec in specs
        for index, dim in enumerate(spec.dims)
        if dim.name == target.name
    ]


def _changed(
    spec: InputSpec, places: Collection[tuple[str, int]], option: DynamicOption
) -> InputSpec:
    from enginecast.capture.inputs.specs import DimSpec

    axes = IMAGE_AXES if spec.kind == "image" else {}
    dims = list(spec.dims)
    for index, dim in enumerate(spec.dims):
        if (spec.name, index) not in places:
            continue
        if dim.parts:
            dims[index] = replace(dim, cap=option.maximum)
            continue
        if option.is_static:
            dims[index] = DimSpec.static(option.minimum)
            continue
        is_in_steps = not (option.minimum % dim.step or option.maximum % dim.step)
        dims[index] = replace(
            dim,
            name=dim.name or axes.get(index, f"{spec.name}_{index}"),
            # What may be empty stays so.
            minimum=option.minimum if dim.name is None or dim.minimum else 0,
            maximum=option.maximum,
            asked=not option.is_guess,
            step=dim.step if option.is_profile and is_in_steps else option.step,
        )
        dims[index] = replace(dims[index], size=dims[index].fit(dim.size))
    return replace(spec, dims=tuple(dims))


def parse_values(text: str) -> tuple[str, int, int]:
    """Parse `NAME=MIN..MAX`.

    Raises:
        UsageError: the text has another form.
    """
    match = VALUES.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--values {text}: expected NAME=MIN..MAX", hint="For example timestep=0..1000."
        )
    return match["input"], int(match["low"]), int(match["high"])


def apply_values(specs: tuple[InputSpec, ...], texts: Sequence[str]) -> tuple[InputSpec, ...]:
    """Set the ranges of whole numbers, `NAME=MIN..MAX` each.

    Raises:
        UsageError: the text has another form, names no integer input, or has an empty range.
    """
    asked: dict[str, InputSpec] = {}
    by_name = {spec.name: spec for spec in specs}
    for text in texts:
        name, low, high = parse_values(text)
        spec = by_name.get(name)
        if spec is None:
            names = ", ".join(by_name)
            raise UsageError(f"--values {text}: no input {name!r}; expected one of {names}")
        if spec.name in asked:
            raise UsageError(f"--values {text}: {spec.name} already has a range")
        asked[spec.name] = _with_values(spec, low, high, text)
    return tuple(asked.get(spec.name, spec) for spec in specs)


def _with_values(spec: InputSpec, low: int, high: int, text: str) -> InputSpec:
    import torch

    if not spec.is_whole:
        kind = str(spec.dtype).removeprefix("torch.")
        raise UsageError(
            f"--values {text}: {spec.name} is {kind}; only integer inputs have a range"
        )
    limits = torch.iinfo(spec.dtype)
    least, most = (0, 1) if spec.kind == "attention_mask" else (limits.min, limits.max)
    if not least <= low <= high <= most:
        raise UsageError(f"--values {text}: expected {least} <= MIN <= MAX <= {most}")
    for name, number in (("padding", spec.padding), ("ending", spec.ending)):
        if number is not None and not low <= number <= high:
            raise UsageError(f"--values {text}: the {name} id {number} is outside")
    return replace(spec, low=low, high=high, origin="asked")
