"""The shapes that a TensorRT engine is built for: its optimization profiles, from the recorded
ranges.

A profile has a least, an optimal and a greatest shape of each input; the engine is tuned for the
optimal ones.  A run takes the first profile that has its shapes, so those of few shapes come first.
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-dynamic-shapes.html
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from enginecast.errors import UsageError
from enginecast.exporters.tensorrt.options import PROFILE, NetworkOptions, Profile
from enginecast.runtime.bundle.manifest import Input, ShapeRange

Ranges = Mapping[str, tuple[int, int]]
Sums = Mapping[str, Sequence[tuple[str, int]]]
"""What a symbol is the sum of: symbols, each with the size that it has where it is fixed."""
NO_SUMS: Sums = MappingProxyType({})
NO_STEPS: Mapping[str, int] = MappingProxyType({})
Sizes = dict[str, tuple[int, int, int]]
"""Least, optimal and greatest size of each symbol."""
LARGEST = 2**31 - 1
"""Of a dimension; torch writes a range without an end as a greater one."""
SHORT = 4
"""Sizes up to the greatest by this count as short."""


def profiles_of(
    inputs: Sequence[Input],
    ranges: Ranges,
    options: NetworkOptions,
    sums: Sums = NO_SUMS,
    steps: Mapping[str, int] = NO_STEPS,
) -> tuple[tuple[ShapeRange, ...], ...]:
    """The profiles of an engine, each with the shapes of every input that has a symbolic dimension;
    empty: every shape is fixed.

    Args:
        inputs: as the manifest has them.
        ranges: least and greatest size of each symbol.
        sums: of symbols; TensorRT holds each of a profile's three shapes to them, so the greatest
            may lie beyond the range.  A profile that the user wrote may name other sizes.
        options: `profiles` and `optimal` hold what the user chose, by input.
        steps: symbol -> its sizes are multiples of this; sums of other symbols have none.

    Raises:
        UsageError: a chosen shape is of no input, has another rank, lies outside of the ranges or
            between two steps, or gives one symbol two sizes; the user's profiles end elsewhere
            than a range does; or a symbol's range has no end.
    """
    _require_ends(inputs, ranges)
    varying = [one for one in inputs if any(isinstance(size, str) for size in one.shape)]
    if not varying:
        return ()
    if options.profiles:
        sizes = [_given_sizes(inputs, ranges, steps, each, sums) for each in options.profiles]
        _require_ranges(sizes, {name: ranges[name] for name in steps})
    elif options.optimal:
        said = "--target-option opt-shape="
        chosen = _chosen_sizes(inputs, ranges, steps, options.optimal, said)
        sizes = [_summed(_whole(ranges, chosen), sums)]
    else:
        sizes = [_summed(each, sums) for each in default_profiles(varying, ranges, steps)]
    return tuple(
        tuple(
            ShapeRange(
                name=one.name,
                profile=number,
                **dict(zip(("least", "optimal", "greatest"), _shapes(one, each), strict=True)),
            )
            for one in varying
        )
        for number, each in enumerate(sizes)
    )


def default_profiles(
    inputs: Sequence[Input], ranges: Ranges, steps: Mapping[str, int]
) -> list[Sizes]:
    """One short row, one row of any length, and a batch; the last one takes every shape.

    A batch is the symbol that is first in all inputs; short is a quarter of the greatest size.
    """
    used = dict.fromkeys(size for one in inputs for size in one.shape if isinstance(size, str))
    first = {one.shape[0] for one in inputs}
    batch = first if len(first) == 1 else set[int | str]()
    short: Sizes = {}
    for name in used:
        low, high = ranges[name]
        step = SHORT * steps.get(name, 1)
        most = low if name in batch else max(low, high // step * steps.get(name, 1))
        short[name] = (low, most, most)
    long = {n: short[n] if n in batch else (low, high, high) for n, (low, high) in ranges.items()}
    best = {n: high if n in batch else short[n][1] for n, (_, high) in ranges.items() if n in used}
    several = [short, long, _whole(ranges, best)]
    kept: list[Sizes] = []
    for each in several:
        each = {name: each[name] for name in used}
        if each not in kept:
            kept.append(each)
    return kept


def _summed(sizes: Sizes, sums: Sums) -> Sizes:
    """With the sums of sizes in place of what was chosen for them."""
    found = dict(sizes)
    for name in sums.keys() & sizes.keys():
        parts = [sizes.get(part, (size, size, size)) for part, size in sums[name]]
        least, optimal, greatest = map(sum, zip(*parts, strict=True))
        found[name] = (least, optimal, greatest)
    return found


def _whole(ranges: Ranges, optimal: Mapping[str, int]) -> Sizes:
    return {name: (low, optimal.get(name, high), high) for name, (low, high) in ranges.items()}


def _given_sizes(
    inputs: Sequence[Input],
    ranges: Ranges,
    steps: Mapping[str, int],
    profile: Profile,
    sums: Sums,
) -> Sizes:
    """The sizes of a profile that a user wrote: by input, least, optimal and greatest shape."""
    found = [
        _chosen_sizes(
            inputs, ranges, steps, {n: shapes[i] for n, shapes in profile.items()}, f"{PROFILE} "
        )
        for i in range(3)
    ]
    sizes: Sizes = _whole(ranges, {})
    for name in found[0]:
        sizes[name] = (found[0][name], found[1][name], found[2][name])
    return _summed(sizes, {name: sums[name] for name in sums.keys() - found[0].keys()})


def _require_ranges(profiles: Sequence[Sizes], ranges: Ranges) -> None:
    for name, (low, high) in ranges.items():
        least, most = (
            min(each[name][0] for each in profiles),
            max(each[name][2] for each in profiles),
        )
        if most != high or (low and least != low):  # what may be empty, --profile leaves so
            raise UsageError(
                f"{PROFILE}: {name} from {least} to {most}, and --dynamic has it from {low} to"
                f" {high}, which the engine would not take",
                hint="Leave --dynamic out, or give profiles that have its least and greatest size.",
            )


def left_out(
    inputs: Sequence[Input],
    ranges: Ranges,
    steps: Mapping[str, int],
    profiles: Sequence[Sequence[ShapeRange]],
) -> tuple[str, ...]:
    """A note of the sizes within the ranges that no profile has; empty: there are none."""
    shapes = {one.name: one.shape for one in inputs}
    said = []
    for name, step in steps.items():
        spans = {
            (least, greatest)
            for one in (one for profile in profiles for one in profile)
            for size, least, greatest in zip(shapes[one.name], one.least, one.greatest, strict=True)
            if size == name
        }
        at, gaps = ranges[name][0], []
        for least, greatest in sorted(spans):
            if at < least:
                gaps.append("..".join(map(str, dict.fromkeys((at, least - step)))))
            at = max(at, greatest + step)
        if gaps:
            are = "are" if len(gaps) > 1 or ".." in gaps[0] else "is"
            said.append(f"{name}: {' and '.join(gaps)} {are} in no profile")
    return ("; ".join(said),) if said else ()


def _chosen_sizes(
    inputs: Sequence[Input],
    ranges: Ranges,
    steps: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    said: str,
) -> dict[str, int]:
    """The size of each symbol that the user chose a shape for.

    Args:
        said: how the user's option begins, for messages.
    """
    by_name = {one.name: one for one in inputs}
    chosen: dict[str, tuple[int, str]] = {}
    for name, shape in shapes.items():
        option = f"{said}{name}={'x'.join(map(str, shape))}"
        if name not in by_name:
            raise UsageError(f"{option}: expected one of the inputs {', '.join(by_name)}")
        declared = by_name[name].shape
        if len(shape) != len(declared):
            shown = "x".join(map(str, declared))
            raise UsageError(
                f"{option}: expected {len(declared)} sizes, as of {shown}, got {len(shape)}"
            )
        for dim, size in zip(declared, shape, strict=True):
            if isinstance(dim, int):
                if size != dim:
                    raise UsageError(f"{option}: expected {dim}, which is fixed, got {size}")
                continue
            low, high = ranges[dim]
            if not low <= size <= high:
                raise UsageError(f"{option}: expected {dim} from {low} to {high}, got {size}")
            if size % steps.get(dim, 1):
                raise UsageError(f"{option}: expected {dim} in steps of {steps[dim]}, got {size}")
            before, where = chosen.setdefault(dim, (size, option))
            if before != size:
                raise UsageError(f"{option}: {dim} is {size} here and {before} in {where}")
    return {name: size for name, (size, _) in chosen.items()}


def _require_ends(inputs: Sequence[Input], ranges: Ranges) -> None:
    for one in inputs:
        for index, dim in enumerate(one.shape):
            if isinstance(dim, str) and ranges[dim][1] > LARGEST:
                raise UsageError(
                    f"input '{one.name}': {dim} has no upper bound, and TensorRT reserves memory"
                    " for the largest shape",
                    hint=f"Give one: --dynamic {one.name}:{index}={ranges[dim][0]}..512.",
                )


def _shapes(one: Input, sizes: Sizes) -> Iterator[tuple[int, ...]]:
    for index in range(3):
        yield tuple(sizes[size][index] if isinstance(size, str) else size for size in one.shape)
