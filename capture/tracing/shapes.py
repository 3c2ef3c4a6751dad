"""Compare the dimensions that were asked for with those that a program kept.

torch.export also keeps what the code decided by sizes as guards.  Those that are not a range of one
dimension, such as `h * w % 7 != 0` or `h != w`, are neither in the ranges nor in the program.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import sympy  # type: ignore[import-untyped] # it has no stubs
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type

from enginecast.capture.inputs.specs import DimSpec, InputSpec, named_dims, ranges_of
from enginecast.capture.outputs.flatten import OutputSpec
from enginecast.capture.refusals.refusal import place_of
from enginecast.errors import CaptureError

Range = tuple[int, int]
MOST_TRIED = 4000
"""Combinations of sizes that are tried for one guard."""
NEAREST = 20
"""Sizes of one dimension that are tried from the smallest on, besides the largest."""


class FrozenDimensionError(CaptureError):
    """Dimensions that were to vary do not in the program; `names` would have to be fixed."""

    def __init__(self, message: str, names: tuple[str, ...], *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.names = names


def dynamic_shapes(specs: tuple[InputSpec, ...]) -> dict[str, dict[int, object]]:
    """The `dynamic_shapes` argument of torch.export: one `Dim` for each name."""
    dims: dict[str, object] = {}
    shapes: dict[str, dict[int, object]] = {}
    for spec in specs:
        shapes[spec.name] = {}
        for index, dim in enumerate(spec.dims):
            if dim.name is not None:
                made = dims.setdefault(dim.name, Dim(dim.name, min=dim.minimum, max=dim.maximum))
                shapes[spec.name][index] = made
    return shapes


def check_shapes(
    program: ExportedProgram, specs: tuple[InputSpec, ...]
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """Compare the named dimensions of `specs` with the placeholders of `program`.

    torch.export does not always complain: two dimensions may silently become one, as height and
    width do in DINOv2.

    Returns:
        The inputs with the ranges that the program has, and a sentence on each that is narrower.

    Raises:
        CaptureError: a dimension became constant, two names became one symbol, or one name two.
    """
    dims = named_dims(specs)
    kept: dict[str | None, DimSpec] = {}
    notes: list[str] = []
    for symbol, name in symbol_names(program, specs).items():
        asked, (low, high) = dims[name], symbol_range(program, symbol)
        low, high = max(low, asked.minimum), min(high, asked.maximum)
        kept[name] = replace(asked, minimum=low, maximum=high)
        if (low, high) != (asked.minimum, asked.maximum):
            notes.append(
                f"{name} was asked for as {asked.minimum}..{asked.maximum}, "
                f"the model takes {low}..{high}"
            )
    inputs = (
        replace(spec, dims=tuple(kept.get(dim.name, dim) for dim in spec.dims)) for spec in specs
    )
    return tuple(inputs), tuple(notes)


def symbol_names(program: ExportedProgram, specs: tuple[InputSpec, ...]) -> dict[sympy.Symbol, str]:
    """Our name of each symbol in the placeholders of `program`.

    Raises:
        CaptureError: as `check_shapes`.
    """
    values = input_values(program)
    names: dict[sympy.Symbol, str] = {}
    symbols: dict[str, sympy.Symbol] = {}
    for spec in specs:
        for index, dim in enumerate(spec.dims):
            if dim.name is None:
                continue
            symbol = _symbol(values[spec.name].shape[index], spec.name, index, dim.name)
            if names.setdefault(symbol, dim.name) != dim.name:
                raise FrozenDimensionError(
                    f"the model wants {names[symbol]} and {dim.name} to be equal "
                    f"({spec.name}, dimension {index})",
                    (names[symbol], dim.name),
                    hint=f"Fix one of them: --dynamic {spec.name}:{index}={dim.size}.",
                )
            if symbols.setdefault(dim.name, symbol) != symbol:
                raise CaptureError(
                    f"{dim.name} of {spec.name} (dimension {index}) is not tied to the other "
                    f"inputs' {dim.name} in the program"
                )
    return names


def input_values(program: ExportedProgram) -> dict[str, Tensor]:
    """Fake tensors of the user's inputs by name."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return {
        spec.arg.name: nodes[spec.arg.name].meta["val"]
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    }


def output_specs(
    program: ExportedProgram, output_names: tuple[str, ...], names: Mapping[sympy.Symbol, str]
) -> tuple[OutputSpec, ...]:
    """Name, dtype and dimensions of each output; dimensions in our names.

    A size that the values decide (how many elements a mask keeps) is called after the first output
    that has it, as `NAME_DIMENSION`: nothing is promised of its range.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    values = [
        nodes[spec.arg.name].meta["val"]
        for spec in program.graph_signature.output_specs
        if spec.kind == OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)
    ]
    names = {**data_sizes(output_names, [value.shape for value in values]), **names}
    return tuple(
        OutputSpec(name, value.dtype, tuple(_dim(size, names) for size in value.shape))
        for name, value in zip(output_names, values, strict=True)
    )


def data_sizes(
    output_names: Sequence[str], shapes: Sequence[Sequence[int | torch.SymInt]]
) -> dict[sympy.Symbol, str]:
    """A name for each size that the values decide, by torch's symbol for it."""
    names: dict[sympy.Symbol, str] = {}
    for output, shape in zip(output_names, shapes, strict=True):
        for index, size in enumerate(shape):
            found = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
            for symbol in sorted(found, key=str):
                if symbol_is_type(symbol, SymT.UNBACKED_INT):
                    names.setdefault(symbol, f"{output}_{index}")
    return names


def _dim(size: int | torch.SymInt, names: Mapping[sympy.Symbol, str]) -> int | str:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    renamed = expression.xreplace({symbol: sympy.Symbol(name) for symbol, name in names.items()})
    return str(renamed)


def _symbol(size: int | torch.SymInt, input_name: str, index: int, name: str) -> sympy.Symbol:
    expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
    if isinstance(expression, sympy.Symbol):
        return expression
    what = f"is always {expression}" if expression.is_number else f"must be {expression}"
    raise FrozenDimensionError(
        f"{name} cannot vary: dimension {index} of {input_name} {what} in this model",
        (name,),
        hint=f"Fix it: --dynamic {input_name}:{index}={size}."
        if expression.is_number
        else f"Fix it: --dynamic {input_name}:{index}=SIZE.",
    )


def symbol_range(program: ExportedProgram, symbol: sympy.Symbol) -> Range:
    """Smallest and largest value of `symbol` in `program`."""
    kept = program.range_constraints.get(symbol)
    if kept is None:
        return 0, 2**63 - 1
    upper = 2**63 - 1 if kept.upper in (int_oo, sympy.oo) else int(kept.upper)
    return int(kept.lower), upper


@dataclass(frozen=True)
class OtherSizes:
    """Sizes in range that break a guard."""

    place: str
    """FILE:LINE of the code that decided; empty when it is torch's own."""
    sizes: Mapping[str, int]
    """By dimension name."""


def other_sizes(program: ExportedProgram, specs: tuple[InputSpec, ...]) -> tuple[OtherSizes, ...]:
    """For each guard of the trace the smallest sizes that the specs allow and the guard does not.

    Args:
        program: as torch.export gave it, in this process: a stored one has no guards.
        specs: its inputs, with the ranges that were kept.
    """
    symbols = symbol_names(program, specs)
    ranges = ranges_of(specs)
    shapes = [value.shape for value in input_values(program).values()]
    sizes: list[Any] = [
        size for shape in shapes for size in shape if isinstance(size, torch.SymInt)
    ]
    found: dict[tuple[tuple[str, int], ...], OtherSizes] = {}
    for guard in sizes[0].node.shape_env.guards if sizes else ():
        broken = _breaking(guard.expr, symbols, ranges)
        if broken is not None:
            place = place_of(guard)
            other = OtherSizes(str(place) if place else "", broken)
            found.setdefault(tuple(broken.items()), other)
    return tuple(found.values())


def _breaking(
    guard: Any, symbols: Mapping[Any, str], ranges: Mapping[str, tuple[int, int]]
) -> dict[str, int] | None:
    """The first sizes that break `guard`; None when none was found, or it is not about sizes."""
    free = sorted(guard.free_symbols, key=str)
    if not free or any(symbol not in symbols for symbol in free):
        return None
    names = [symbols[symbol] for symbol in free]
    for sizes in islice(_combinations([ranges[name] for name in names]), MOST_TRIED):
        try:
            holds = guard.subs(dict(zip(free, sizes, strict=True)))
        except (TypeError, ValueError, ArithmeticError):
            continue
        if not holds:
            return dict(zip(names, sizes, strict=True))
    return None


def _combinations(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    sizes = [
        [*range(low, min(high, low + NEAREST) + 1), *([high] if high > low + NEAREST else [])]
        for low, high in ranges
    ]
    if math.prod(map(len, sizes)) <= MOST_TRIED:
        yield from sorted(product(*sizes), key=sum)
    else:
        yield from product(*sizes)
