"""Sizes that vary in a program.  Code that reads a symbolic size as a number fixes it, in each
program that shares the symbol, and torch says nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from enginecast.passes.ir.edit import value


class SizeReadError(Exception):
    """Code decides by a size that varies."""


def fixed_sizes(program: ExportedProgram) -> dict[Any, Any]:
    """The symbols in a program's ranges that are one number, and that number."""
    environment = _environment(program)
    known = {} if environment is None else environment.replacements
    found = {symbol: known.get(symbol) for symbol in program.range_constraints}
    return {symbol: size for symbol, size in found.items() if getattr(size, "is_number", False)}


@contextmanager
def varying(program: ExportedProgram) -> Iterator[None]:
    """Let nothing in the block decide by a size that varies.

    Raises:
        SizeReadError: something does; the sizes vary as before.
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


def _environment(program: ExportedProgram) -> Any:
    values = map(value, program.graph.nodes)
    modes = (found.fake_mode for found in values if isinstance(found, FakeTensor))
    return getattr(next(modes, None), "shape_env", None)
