"""Sizes at which a model's code goes another way than its trace.

torch.export keeps what the code decided by sizes as guards.  Those that are no range of one
dimension, such as `h * w % 7 != 0` or `h != w`, are neither in the ranges nor in the program.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from traceback import FrameSummary
from typing import Any

from torch import SymInt, Tensor
from torch.export import ExportedProgram

from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.python.locations import is_model_code

MOST_TRIED = 4000
"""Combinations of sizes that are tried for one guard."""
NEAREST = 20
"""Sizes of one dimension that are tried from the smallest on, besides the largest."""


@dataclass(frozen=True)
class OtherSizes:
    """Sizes in range that break a guard."""

    place: str
    """FILE:LINE of the code that decided; empty when it is torch's own."""
    sizes: Mapping[str, int]
    """By dimension name."""


def other_sizes(program: ExportedProgram, specs: Sequence[InputSpec]) -> tuple[OtherSizes, ...]:
    """For each guard of the trace the smallest sizes that the specs allow and the guard does not.

    Args:
        program: as torch.export gave it, in this process: a stored one has no guards.
        specs: its inputs, with the ranges that were kept.
    """
    symbols, environment = _symbols(program, specs)
    ranges = {d.name: (d.minimum, d.maximum) for s in specs for d in s.dims if d.name is not None}
    found: dict[tuple[tuple[str, int], ...], OtherSizes] = {}
    for guard in environment.guards if environment is not None else ():
        sizes = _breaking(guard.expr, symbols, ranges)
        if sizes is not None:
            found.setdefault(tuple(sizes.items()), OtherSizes(_place(guard), sizes))
    return tuple(found.values())


def _symbols(program: ExportedProgram, specs: Sequence[InputSpec]) -> tuple[dict[Any, str], Any]:
    """Names of dimensions by the trace's symbol, and what holds its guards."""
    by_name = {spec.name: spec for spec in specs}
    symbols: dict[Any, str] = {}
    environment = None
    for node in program.graph.find_nodes(op="placeholder"):
        spec, value = by_name.get(node.name), node.meta.get("val")
        if spec is None or not isinstance(value, Tensor):
            continue
        for dim, size in zip(spec.dims, value.shape, strict=True):
            if isinstance(size, SymInt) and dim.name is not None:
                symbols[size.node.expr] = dim.name
                environment = size.node.shape_env
    return symbols, environment


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


def _place(guard: Any) -> str:
    frame = guard.sloc.framework_loc
    if isinstance(frame, FrameSummary) and is_model_code(frame.filename):
        return f"{frame.filename}:{frame.lineno}"
    return ""
