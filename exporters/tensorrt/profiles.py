"""The shapes that a TensorRT engine is built for: one optimization profile, from the recorded
ranges.

The engine takes every shape of the ranges and is tuned for one.  Unless a user names that one, it
is the largest, as with NVIDIA's trtexec, which completes a profile by "opt equal to max": kernels
that are fast there are never far off below, while those of a small shape can be slow at the
largest.  https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-dynamic-shapes.html
"""

from collections.abc import Mapping, Sequence

from enginecast.errors import UsageError
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.runtime.bundle.manifest import Input, ShapeRange

Ranges = Mapping[str, tuple[int, int]]
LARGEST = 2**31 - 1
"""Of a dimension; torch writes a range without an end as a greater one."""


def profile_of(
    inputs: Sequence[Input], ranges: Ranges, options: TensorRTOptions
) -> tuple[ShapeRange, ...]:
    """Least, optimal and greatest shape of each input that has a symbolic dimension.

    Args:
        inputs: as the manifest has them.
        ranges: least and greatest size of each symbol.
        options: `optimal` holds what the user chose, by input.

    Raises:
        UsageError: a chosen shape is of no input, has another rank, lies outside of the ranges, or
            gives one symbol two sizes; or a symbol's range has no end.
    """
    _require_ends(inputs, ranges)
    least = {name: low for name, (low, _) in ranges.items()}
    greatest = {name: high for name, (_, high) in ranges.items()}
    optimal = greatest | _chosen_sizes(inputs, ranges, options.optimal)
    return tuple(
        ShapeRange(
            name=one.name,
            least=_shape(one, least),
            optimal=_shape(one, optimal),
            greatest=_shape(one, greatest),
        )
        for one in inputs
        if any(isinstance(size, str) for size in one.shape)
    )


def _chosen_sizes(
    inputs: Sequence[Input], ranges: Ranges, optimal: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """The size to tune for, of each symbol that the user chose a shape for."""
    by_name = {one.name: one for one in inputs}
    chosen: dict[str, tuple[int, str]] = {}
    for name, shape in optimal.items():
        option = f"--target-option opt-shape={name}={'x'.join(map(str, shape))}"
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


def _shape(one: Input, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[size] if isinstance(size, str) else size for size in one.shape)
