"""Guard symbolic sizes: code that reads one as a number specializes it in every program that shares
the symbol, and torch does not report it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from enginecast.passes.ir.edit import value


class SizeReadError(Exception):
    """Code branched on a size that varies."""


def fixed_sizes(program: ExportedProgram) -> dict[Any, Any]:
    """The symbols of a program whose range is a single number, with that number."""
    environment = _environment(program)
    known = {} if environment is None else environment.replacements
    found = {symbol: known.get(symbol) for symbol in program.range_constraints}
    return {symbol: size for symbol, size in found.items() if getattr(size, "is_number", False)}


@contextmanager
def varying(program: ExportedProgram) -> Iterator[None]:
    """Raise an error if the block specializes a size that varies.

    Raises:
        SizeReadError: it does; the sizes are restored and vary as before.
    """
    environment = _environment(program)
    if not hasattr(environment, "error_on_new_guards"):  # older versions of torch
        yield
        return
    try:
        with environment.error_on_new_guards():
            yield
    except RuntimeError as error:
        if type(error).__name__ != "_ShapeEnvGuardError":
            raise
        raise SizeReadError(str(error)) from error


def may_be_zero(size: Any) -> bool:
    """Whether a size can be 0 although every input size is at least 1."""
    if not isinstance(size, torch.SymInt):
        return bool(size == 0)
    known, symbols = size.node.shape_env.var_to_range, size.node.expr.free_symbols
    chosen = free_unbacked_symbols(size)
    ranges = {
        symbol: ValueRanges(0 if symbol in chosen else _least(known.get(symbol)), int_oo)
        for symbol in symbols
    }
    return bool(bound_sympy(size.node.expr, ranges).lower <= 0)


def _least(bounds: Any) -> Any:
    """The smallest size of an input; torch reports 2 where it may be 1."""
    return 1 if bounds is None or bounds.lower <= 2 else bounds.lower


def _environment(program: ExportedProgram) -> Any:
    values = map(value, program.graph.nodes)
    modes = (found.fake_mode for found in values if isinstance(found, FakeTensor))
    return getattr(next(modes, None), "shape_env", None)
