"""Compare the requested dimensions with those that the program kept.

torch.export also keeps what the code decided by sizes as guards.  Those that are not a range of one
dimension, such as `h * w % 7 != 0` or `h != w`, are neither in the ranges nor in the program.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import islice, product
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped] # it has no stubs
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.numbers import int_oo

from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.capture.inputs.specs import (
    DimSpec,
    InputSpec,
    dim_place,
    named_dims,
    sums,
    with_sums,
)
from enginecast.capture.outputs.flatten import OutputSpec
from enginecast.capture.refusals.explain import place_of
from enginecast.errors import CaptureError
from enginecast.library_names import aten, private
from enginecast.passes.ir.source import source_line

Range = tuple[int, int]
MOST_AT_ONCE = 5_000_000
"""Combinations of sizes that are tried for one guard, where numpy can try them all at once."""
MOST_TRIED = 100_000
"""Those that are tried one by one."""
NEAREST = 20
"""Sizes of one dimension that are tried from the smallest on, besides the largest."""
_KNOWN: Mapping[str, Any] = {"max": max, "min": min, "float": float, "math": math}
"""Functions in a printed condition."""
_OF_ARRAYS: Mapping[str, Any] = {
    "max": lambda *values: reduce(np.maximum, values),
    "min": lambda *values: reduce(np.minimum, values),
    "float": np.float64,
    "math": np,
}


def printed(expression: sympy.Expr) -> str:
    """A condition on sizes in Python, which `enginecast.runtime.size_checks` reads."""
    return str(_printer().doprint(expression))


@cache
def _printer() -> Any:
    """Prints functions of torch, which is not there where a condition is read, as Python's."""
    plain: Any = private("torch.utils._sympy.printers.PythonPrinter", "a condition on sizes")

    class Printer(plain):  # type: ignore[misc] # only known here
        def _print_ToFloat(self, expr: sympy.Expr) -> str:  # noqa: N802 - torch's name
            return f"float({self._print(expr.args[0])})"

        def _helper_sqrt(self, expr: sympy.Expr) -> str:
            return f"math.sqrt({self._print(expr)})"

    return Printer()


class FrozenDimensionError(CaptureError):
    """Dimensions that were to vary do not in the program; `names` would have to be fixed."""

    def __init__(self, message: str, names: tuple[str, ...], *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.names = names


def dynamic_shapes(specs: tuple[InputSpec, ...]) -> dict[str, dict[int, object]]:
    """The `dynamic_shapes` argument of torch.export: one `Dim` for each name, or with steps one for
    the number of steps.
    """
    dims: dict[str, object] = {}
    uses = Counter(dim.name for spec in specs for dim in spec.dims)
    for name, dim in {**named_dims(specs), **sums(specs)}.items():
        low, high, step = dim.minimum, dim.maximum, dim.step
        if uses[name] > 1:  # torch takes 1..2 for 2 alone, and then ties nothing to it
            high = max(high, 3)
        if dim.parts:  # torch has no sum of two; the model's code has to state it
            dims[name] = Dim.AUTO(min=low, max=high)
        elif step == 1:
            dims[name] = Dim(name, min=low, max=high)
        else:
            dims[name] = step * Dim(f"_{name}", min=low // step, max=high // step)
    return {
        spec.name: {n: dims[dim.name] for n, dim in enumerate(spec.dims) if dim.name is not None}
        for spec in specs
    }


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
        if asked.step > 1:  # torch makes the number of steps two at least
            low, high = asked.minimum, asked.maximum
        low, high = max(low, asked.minimum), min(high, asked.maximum)
        kept[name] = replace(asked, minimum=low, maximum=high)
        if (low, high) != (asked.minimum, asked.maximum):
            wanted = "was asked for as" if asked.asked else "was to be"
            notes.append(
                Downgraded(
                    f"{name} {wanted} {asked.minimum}..{asked.maximum}, "
                    f"the model takes {low}..{high}",
                    "sizes",
                    f"--dynamic {dim_place(specs, name)}={kept[name].shown}",
                    is_asked=asked.asked,
                )
            )
    inputs = (
        replace(spec, dims=tuple(kept.get(dim.name, dim) for dim in spec.dims)) for spec in specs
    )
    return with_sums(tuple(inputs)), tuple(notes)


def symbol_names(program: ExportedProgram, specs: tuple[InputSpec, ...]) -> dict[sympy.Symbol, str]:
    """Our name of each symbol in the placeholders of `program`, which of a dimension with steps is
    the number of steps.

    Raises:
        CaptureError: as `check_shapes`.
    """
    values = input_values(program)
    names: dict[sympy.Symbol, str] = {}
    symbols: dict[str, sympy.Symbol] = {}
    for spec in specs:
        for index, dim in enumerate(spec.dims):
            if dim.name is None or dim.parts:
                continue
            size = values[spec.name].shape[index]
            expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            symbol = expression / dim.step
            if not isinstance(symbol, sympy.Symbol):
                is_fixed = expression.is_number
                what = f"is always {expression}" if is_fixed else f"must be {expression}"
                raise FrozenDimensionError(
                    f"{dim.name} cannot vary: dimension {index} of {spec.name} {what} in this"
                    " model",
                    (dim.name,),
                    hint=f"Fix it: --dynamic {spec.name}:{index}={size if is_fixed else 'SIZE'}.",
                )
            if names.setdefault(symbol, dim.name) != dim.name:
                raise FrozenDimensionError(
                    f"the model wants {names[symbol]} and {dim.name} to be equal "
                    f"({spec.name}, dimension {index})",
                    (names[symbol], dim.name),
                    hint=f"Give them one name: --dynamic {spec.name}:{index}={names[symbol]}.",
                )
            if symbols.setdefault(dim.name, symbol) != symbol:
                raise CaptureError(
                    f"{dim.name} of {spec.name} (dimension {index}) is not tied to the other "
                    f"inputs' {dim.name} in the program"
                )
    for spec in specs:
        for index, dim in enumerate(spec.dims):
            if not dim.parts:
                continue
            size = values[spec.name].shape[index]
            found = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            wanted = sum(symbols.get(name, sympy.Integer(size)) for name, size in dim.parts)
            if found != wanted:
                raise CaptureError(
                    f"{spec.name}: dimension {index} is {found} in the program, expected the sum "
                    f"of {' and '.join(name for name, _ in dim.parts)}, {wanted}"
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
    program: ExportedProgram,
    output_names: tuple[str, ...],
    names: Mapping[sympy.Symbol, sympy.Expr],
) -> tuple[OutputSpec, ...]:
    """Name, dtype and dimensions of each output; dimensions in our names (see `named_sizes`).

    A size that the values decide (how many elements a mask keeps) is called after the first output
    that has it, as `NAME_DIMENSION`: nothing is promised of its range.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    values = [
        nodes[spec.arg.name].meta["val"]
        for spec in program.graph_signature.output_specs
        if spec.kind == OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)
    ]
    unknown = data_sizes(output_names, [value.shape for value in values])
    names = {**{symbol: sympy.Symbol(name) for symbol, name in unknown.items()}, **names}

    def named(size: int | torch.SymInt) -> int | str:
        return size if isinstance(size, int) else str(size.node.expr.xreplace(names))

    return tuple(
        OutputSpec(name, value.dtype, tuple(map(named, value.shape)))
        for name, value in zip(output_names, values, strict=True)
    )


def data_sizes(
    output_names: Sequence[str], shapes: Sequence[Sequence[int | torch.SymInt]]
) -> dict[sympy.Symbol, str]:
    """A name for each size that the values decide, by torch's symbol for it."""
    names: dict[sympy.Symbol, str] = {}
    for output, shape in zip(output_names, shapes, strict=True):
        for index, size in enumerate(shape):
            for symbol in sorted(free_unbacked_symbols(size), key=str):
                names.setdefault(symbol, f"{output}_{index}")
    return names


def named_sizes(
    program: ExportedProgram, specs: tuple[InputSpec, ...]
) -> dict[sympy.Symbol, sympy.Expr]:
    """Each symbol in the placeholders of `program` in our names.

    Raises:
        CaptureError: as `check_shapes`.
    """
    dims = named_dims(specs)
    names = symbol_names(program, specs)
    return {symbol: sympy.Symbol(name) / dims[name].step for symbol, name in names.items()}


def symbol_range(program: ExportedProgram, symbol: sympy.Symbol) -> Range:
    """Smallest and largest value of `symbol` in `program`."""
    kept = program.range_constraints.get(symbol)
    if kept is None:
        return 0, 2**63 - 1
    upper = 2**63 - 1 if kept.upper in (int_oo, sympy.oo) else int(kept.upper)
    return int(kept.lower), upper


@dataclass(frozen=True)
class OtherSizes:
    """Sizes in range at which the model's code takes another path than the trace did."""

    place: str
    """FILE:LINE of the code that decided; empty when it is torch's own."""
    sizes: Mapping[str, int]
    """By dimension name."""
    condition: str = ""
    """What they break, in Python; empty where no guard tells."""
    is_seen: bool = True
    """Whether the code was seen to take another path; else values have to tell."""


@dataclass(frozen=True)
class SizeCheck:
    """What must hold for the sizes of inputs, and was not proved for all in range."""

    condition: str
    """In Python, with the names of dimensions."""
    place: str
    """FILE:LINE of the code that decided; empty when it is torch's own."""


def sum_checks(specs: Sequence[InputSpec]) -> tuple[SizeCheck, ...]:
    """That dimensions which are sums have the size of their parts."""
    return tuple(
        SizeCheck(f"{name} == {' + '.join(part for part, _ in dim.parts)}", "")
        for name, dim in sums(specs).items()
    )


def tried_guards(
    program: ExportedProgram, specs: tuple[InputSpec, ...]
) -> tuple[tuple[OtherSizes, ...], tuple[SizeCheck, ...]]:
    """Try each guard of the trace on the sizes that the specs allow, on all where they are few.

    Args:
        program: as torch.export gave it, in this process: a stored one has no guards.
        specs: its inputs, with the ranges that were kept.

    Returns:
        For each guard that does not hold the smallest sizes that show it, or of one dimension those
        nearest to the traced one; and those guards that
        hold wherever they were tried, where that was not everywhere.
    """
    dims = named_dims(specs)
    names = symbol_names(program, specs)
    shapes = [value.shape for value in input_values(program).values()]
    sizes: list[Any] = [
        size for shape in shapes for size in shape if isinstance(size, torch.SymInt)
    ]
    kept = sizes[0].node.shape_env.guards if sizes else ()
    guards: list[tuple[Any, Any]] = [(guard.expr, place_of(guard)) for guard in kept]
    guards += _asserted(program)
    found: dict[tuple[tuple[str, int], ...], OtherSizes] = {}
    open_guards: dict[str, SizeCheck] = {}
    symbols = _in_names([expression for expression, _ in guards], names, dims)
    for expression, decided_at in guards:
        renamed = expression.xreplace(symbols)
        known = sorted(map(str, renamed.free_symbols))
        if not known or any(name not in dims for name in known):
            continue  # not about sizes
        condition = printed(renamed)
        place = str(decided_at or "")
        sides = [{name: dims[name].sizes for name in known}]
        if len(known) == 1:  # below the traced size and above it, the nearest first
            [name] = known
            dim = dims[name]
            below = range(dim.size - dim.step, dim.minimum - 1, -dim.step)
            sides = [{name: below}, {name: range(dim.size, dim.maximum + 1, dim.step)}]
        for tried in sides:
            broken = _breaking(" | ".join([f"({condition})", *_beyond(specs, known)]), tried)
            if broken:
                other = OtherSizes(place, broken, condition)
                found.setdefault(tuple(broken.items()), other)
            elif broken is None:
                open_guards.setdefault(condition, SizeCheck(condition, place))
    return tuple(found.values()), tuple(open_guards.values())


def _beyond(specs: Sequence[InputSpec], known: Collection[str]) -> list[str]:
    """Conditions on some sizes: that dimensions which are sums are longer than the engine takes."""
    dims, found = named_dims(specs), []
    for total in sums(specs).values():
        names = [name for name, _ in total.parts]
        least = sum(dims[n].minimum if n in dims else s for n, s in total.parts if n not in known)
        terms = [name for name in names if name in known]
        if terms:
            found.append(f"({' + '.join([*terms, str(least)])} > {total.maximum})")
    return found


def _asserted(program: ExportedProgram) -> list[tuple[sympy.Expr, str]]:
    """What the program asserts of sizes, each with its line: guards that torch put off."""
    found = []
    for node in program.graph.nodes:
        if node.target is not aten._assert_scalar.default:
            continue
        asserted = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
        if isinstance(asserted, torch.SymBool):
            found.append((asserted.node.expr, source_line(node)))
    return found


def _in_names(
    guards: Sequence[Any], names: Mapping[sympy.Symbol, str], dims: Mapping[str, DimSpec]
) -> dict[sympy.Symbol, sympy.Expr]:
    """Symbols in our names, where guards say it also those that torch wrote as steps times another:
    a guard of a dimension with steps has either.
    """
    symbols, sizes = {}, {}
    for symbol, name in names.items():
        size, step = sympy.Symbol(name, integer=True), dims[name].step
        symbols[symbol] = FloorDiv(size, step)
        sizes[symbol * step] = size
    for guard in guards:
        if isinstance(guard, sympy.Eq) and guard.rhs in sizes and guard.lhs.is_symbol:
            symbols[guard.lhs] = sizes[guard.rhs]
    return symbols


def output_shapes(
    program: ExportedProgram, specs: tuple[InputSpec, ...], sizes: Mapping[str, int]
) -> list[tuple[int | None, ...]]:
    """The shapes of all outputs at some sizes, as the program declares them; None for a size that
    the values decide.
    """
    dims = named_dims(specs)
    known = {s: sizes[n] // dims[n].step for s, n in symbol_names(program, specs).items()}
    nodes = {node.name: node for node in program.graph.nodes}
    outputs = (
        nodes[spec.arg.name].meta["val"]
        for spec in program.graph_signature.output_specs
        if isinstance(spec.arg, TensorArgument)
    )
    numbers = {symbol: sympy.Integer(number) for symbol, number in known.items()}

    def at(size: int | torch.SymInt) -> int | None:
        found = size if isinstance(size, int) else size.node.expr.xreplace(numbers)
        return int(found) if isinstance(found, int) or found.is_number else None

    return [tuple(map(at, value.shape)) for value in outputs]


def _breaking(condition: str, ranges: Mapping[str, range]) -> dict[str, int] | None:
    """The first sizes that break a condition; empty when it holds for all; None when unknown."""
    code = compile(condition, "<guard>", "eval")
    everything = math.prod(map(len, ranges.values()))
    if not everything:
        return {}
    if everything <= MOST_AT_ONCE:
        axes = [np.array(sizes) for sizes in ranges.values()]
        grids = dict(zip(ranges, np.meshgrid(*axes, indexing="ij", sparse=True), strict=True))
        try:
            holds = np.broadcast_to(
                eval(code, dict(_OF_ARRAYS), grids), [len(axis) for axis in axes]
            )
        except (TypeError, ValueError, ArithmeticError):
            pass  # max, min, trunc, and: of one number at a time
        else:
            index = np.unravel_index(int(np.argmin(holds)), holds.shape)
            worst = {n: int(axis[i]) for n, axis, i in zip(ranges, axes, index, strict=True)}
            return {} if holds[index] else worst
    for sizes in islice(_combinations(list(ranges.values())), MOST_TRIED):
        known = dict(zip(ranges, sizes, strict=True))
        try:
            if not eval(code, dict(_KNOWN), known):
                return known
        except (TypeError, ValueError, ArithmeticError):
            continue
    return {} if everything <= MOST_TRIED else None


def _combinations(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    if math.prod(map(len, ranges)) <= MOST_TRIED:
        yield from product(*ranges)
        return
    sizes = [[*dict.fromkeys([*every[: NEAREST + 1], every[-1]])] for every in ranges]
    if math.prod(map(len, sizes)) <= MOST_TRIED:
        yield from sorted(product(*sizes), key=sum)
    else:
        yield from product(*sizes)
