"""Shapes: one optimisation profile has to hold all of them.

Sources: https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/inference-library/work-dynamic-shapes.html
(a least, best and greatest size of each dynamic dimension); the operators' pages for the volume,
such as https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/operators/NonZero.html.
"""

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from enginecast.exporters.tensorrt.gate.sizes import Ranges, bounds, volume
from enginecast.exporters.tensorrt.gate.violations import Violation, of_value
from enginecast.runtime.bundle.manifest import Input, ShapeRange

MOST_ELEMENTS = 2**31 - 1
"""That a tensor may have."""


def check_ranges(graph: ir.Graph, ranges: Ranges) -> Iterator[Violation]:
    """Each symbol of the inputs has a range, of sizes above 0, that ends."""
    seen = set()
    for value in graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, int) or size.value in seen:
                continue
            seen.add(size.value)
            found = bounds(size, ranges)
            if found is None:
                expected = f"a range for dimension {axis}"
                yield _input(value.name, "range", expected, f"'{size.value}', which has none")
            elif not 0 < found[0] <= found[1] <= MOST_ELEMENTS:
                expected = f"sizes of dimension {axis} from 1 to an end"
                yield _input(value.name, "range", expected, f"{found[0]} to {found[1]}")


def check_inputs(graph: ir.Graph, inputs: Sequence[Input]) -> Iterator[Violation]:
    """The inputs are those of the manifest, if it is given."""
    if not inputs:
        return
    found = {value.name: _sizes(value) for value in graph.inputs}
    for declared in inputs:
        sizes = found.get(declared.name)
        if sizes is None:
            yield _input(
                declared.name, "inputs", "an input of this name", ", ".join(map(str, found))
            )
        elif sizes != declared.shape:
            expected = f"the shape {list(declared.shape)}"
            yield _input(declared.name, "inputs", expected, str(list(sizes)))


def check_optimal(
    inputs: Mapping[str, tuple[int | str, ...]],
    ranges: Ranges,
    optimal: Mapping[str, tuple[int, ...]],
) -> Iterator[Violation]:
    """A shape to tune for lies within the ranges, and a symbol has one size in all of them."""
    chosen: dict[str, tuple[int, str]] = {}
    for name, sizes in optimal.items():
        shape = inputs.get(name)
        if shape is None or len(shape) != len(sizes):
            expected = "a shape to tune for with as many sizes as the input has"
            yield _input(name, "optimal", expected, f"{list(sizes)} for {shape and list(shape)}")
            continue
        for declared, size in zip(shape, sizes, strict=True):
            yield from _check_size(name, declared, size, ranges)
            before = chosen.setdefault(str(declared), (size, name))
            if isinstance(declared, str) and before[0] != size:
                expected = f"'{declared}' of {before[0]}, as for {before[1]}"
                yield _input(name, "one-range", expected, str(size))


def _check_size(name: str, declared: int | str, size: int, ranges: Ranges) -> Iterator[Violation]:
    least, most = (
        (declared, declared) if isinstance(declared, int) else ranges.get(declared, (0, 0))
    )
    if not least <= size <= most:
        several = f"{least} to {most}" if least < most else str(least)
        yield _input(name, "optimal", f"a size of {several} to tune for", str(size))


def check_profile(
    inputs: Mapping[str, tuple[int | str, ...]], profile: Sequence[ShapeRange]
) -> Iterator[Violation]:
    """Each input with a symbol has a row, its sizes rise, and a symbol is the same in all rows."""
    rows = {row.name: row for row in profile}
    symbols: dict[str, tuple[tuple[int, int, int], str]] = {}
    for name, shape in inputs.items():
        row = rows.get(name)
        if row is None:
            if any(isinstance(size, str) for size in shape):
                yield _input(name, "profile", "a row in the profile", "none")
            continue
        sizes = (row.least, row.optimal, row.greatest)
        if any(len(found) != len(shape) for found in sizes):
            got = ", ".join(str(list(found)) for found in sizes)
            yield _input(name, "profile", f"{len(shape)} sizes in each shape", got)
            continue
        for declared, triple in zip(shape, zip(*sizes, strict=True), strict=True):
            yield from _check_triple(name, declared, triple, symbols)


def _check_triple(
    name: str,
    declared: int | str,
    triple: tuple[int, ...],
    symbols: dict[str, tuple[tuple[int, int, int], str]],
) -> Iterator[Violation]:
    least, best, most = triple
    if isinstance(declared, int):
        if {least, best, most} != {declared}:
            yield _input(name, "profile", f"the fixed size {declared}", f"{least}, {best}, {most}")
        return
    if not 0 < least <= best <= most:
        yield _input(name, "profile", f"'{declared}' rising from 1 on", f"{least}, {best}, {most}")
    before = symbols.setdefault(declared, ((least, best, most), name))
    if before[0] != (least, best, most):
        expected = f"'{declared}' of {_words(before[0])}, as in {before[1]}"
        yield _input(name, "one-range", expected, _words((least, best, most)))


def check_volumes(graph: ir.Graph, ranges: Ranges) -> Iterator[Violation]:
    """No tensor can become larger than TensorRT's layers take."""
    for value in _values(graph):
        most = volume(value.shape, ranges)
        if most is not None and most > MOST_ELEMENTS:
            expected = f"at most {MOST_ELEMENTS:,} elements"
            yield of_value(value, "volume", expected, f"{most:,} of {value.name} {value.shape}")


def unknown_sizes(graph: ir.Graph, ranges: Ranges) -> int:
    """Of how many tensors the largest size is not known."""
    return sum(volume(value.shape, ranges) is None for value in _values(graph))


def input_shapes(graph: ir.Graph) -> dict[str, tuple[int | str, ...]]:
    """Of each input: sizes, and names of those that vary."""
    return {value.name or "": _sizes(value) for value in graph.inputs}


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def _sizes(value: ir.Value) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size.value) for size in value.shape or ())


def _words(triple: tuple[int, int, int]) -> str:
    return f"{triple[0]} to {triple[2]}, tuned for {triple[1]}"


def _input(name: str | None, rule: str, expected: str, got: str) -> Violation:
    return Violation(rule, name or "", "", "", "", expected, got)
