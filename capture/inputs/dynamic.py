"""`--dynamic NAME:DIM=MIN..MAX` (a range) and `--dynamic NAME:DIM=K` (a fixed size)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from enginecast.capture.inputs.specs import DimSpec, InputSpec, with_example_sizes
from enginecast.errors import UsageError

FORM = re.compile(r"(?P<input>[^:=]+):(?P<dim>\d+)=(?P<minimum>\d+)(?:\.\.(?P<maximum>\d+))?")
IMAGE_AXES = {2: "height", 3: "width"}


@dataclass(frozen=True)
class DynamicOption:
    """One option, parsed: sizes `minimum..maximum` for dimension `dim` of `input`."""

    input: str
    dim: int
    minimum: int
    maximum: int
    text: str
    """As the user wrote it, for messages."""

    @property
    def is_static(self) -> bool:
        return self.minimum == self.maximum


def parse_dynamic(text: str) -> DynamicOption:
    """Parse `NAME:DIM=MIN..MAX` or `NAME:DIM=K`.

    Raises:
        UsageError: another form, a size below 1, or an empty range.
    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--dynamic {text}: expected NAME:DIM=MIN..MAX or NAME:DIM=K",
            hint="For example --dynamic input_ids:1=1..512; dimensions count from 0.",
        )
    minimum = int(match["minimum"])
    maximum = int(match["maximum"] or minimum)
    if not 1 <= minimum <= maximum:
        raise UsageError(f"--dynamic {text}: expected 1 <= MIN <= MAX")
    return DynamicOption(match["input"], int(match["dim"]), minimum, maximum, text.strip())


def apply_dynamic(
    specs: tuple[InputSpec, ...], options: Sequence[DynamicOption]
) -> tuple[InputSpec, ...]:
    """Set the ranges of dimensions; a name that several inputs share changes in all of them.

    Raises:
        UsageError: no such input or dimension, or two options that contradict each other.
    """
    seen: dict[tuple[str, int], DynamicOption] = {}
    changed = specs
    for option in options:
        for place in _places(specs, option):
            earlier = seen.setdefault(place, option)
            if (earlier.minimum, earlier.maximum) != (option.minimum, option.maximum):
                raise UsageError(
                    f"--dynamic {option.text} contradicts --dynamic {earlier.text}: "
                    "both set the same dimension"
                )
            changed = tuple(_apply_at(place, spec, option) for spec in changed)
    return with_example_sizes(changed)


def _places(specs: tuple[InputSpec, ...], option: DynamicOption) -> list[tuple[str, int]]:
    """Input and index of the dimension that is meant, and of those that share its name."""
    target = _find(specs, option)
    if target.name is None:
        return [(option.input, option.dim)]
    return [
        (spec.name, index)
        for spec in specs
        for index, dim in enumerate(spec.dims)
        if dim.name == target.name
    ]


def _find(specs: tuple[InputSpec, ...], option: DynamicOption) -> DimSpec:
    spec = next((spec for spec in specs if spec.name == option.input), None)
    if spec is None:
        names = ", ".join(spec.name for spec in specs)
        raise UsageError(f"--dynamic {option.text}: no input {option.input!r}; there is {names}")
    if option.dim >= len(spec.dims):
        raise UsageError(
            f"--dynamic {option.text}: {spec.name} has dimensions 0 to {len(spec.dims) - 1}"
        )
    return spec.dims[option.dim]


def _apply_at(place: tuple[str, int], spec: InputSpec, option: DynamicOption) -> InputSpec:
    dims = tuple(
        _changed(spec, index, dim, option) if (spec.name, index) == place else dim
        for index, dim in enumerate(spec.dims)
    )
    return replace(spec, dims=dims)


def _changed(spec: InputSpec, index: int, dim: DimSpec, option: DynamicOption) -> DimSpec:
    if option.is_static:
        return DimSpec.static(option.minimum)
    fallback = f"{spec.name}_{index}"
    own = IMAGE_AXES.get(index, fallback) if spec.kind == "image" else fallback
    size = min(max(dim.size, option.minimum), option.maximum)
    return DimSpec(
        dim.name or own, size, option.minimum, option.maximum, asked=True, given=dim.given
    )
