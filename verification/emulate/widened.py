"""Run a program with its 16-bit values widened: weights keep the rounding of their stored dtype,
and everything else is computed in fp32, or fp64.

An engine file whose 16-bit values are widened must give the same, up to the rounding of fp32.  What
a number in the program becomes is for the file to say: a constant of 16 bits, or an attribute of
fp32.  So a file may also be anywhere between the program with its numbers rounded and without.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_aggregate

from enginecast.passes.ir.blocks import is_structured, run_structured
from enginecast.passes.ir.edit import value
from enginecast.passes.ir.effects import is_metadata_check
from enginecast.passes.ir.interpret import Run, named, run_number
from enginecast.verification.eager.outputs import Case, as_arrays
from enginecast.verification.reference import ReferenceCase

_LOW = (torch.float16, torch.bfloat16)


def widened_cases(
    program: ExportedProgram, cases: Sequence[Case], names: Sequence[str]
) -> Iterator[tuple[ReferenceCase, ...]]:
    """What a widened program gives in fp32 and, as the reference, in fp64: with its numbers
    rounded to 16 bits; and then with both beside each other, rounded and not.

    Args:
        program: after its lowering passes.
        names: of the tensor outputs, in order.
    """

    def run(wide: torch.dtype, *, rounds: bool) -> list[dict[str, Any]]:
        with torch.no_grad():
            results = _Widened(program, [case.inputs for case in cases], wide, rounds).results()
        return [as_arrays(named(found, names)) for found in results]

    rounded = run(torch.float64, rounds=True)
    found = tuple(
        ReferenceCase(case.name, as_arrays(case.inputs), plain, exact)
        for case, plain, exact in zip(cases, run(torch.float32, rounds=True), rounded, strict=True)
    )
    yield found
    plain = run(torch.float32, rounds=False)
    yield tuple(replace(case, outputs=side) for case, side in zip(found, plain, strict=True))


class _Widened(Run):
    def __init__(
        self,
        program: ExportedProgram,
        cases: Sequence[Mapping[str, Tensor]],
        wide: torch.dtype,
        rounds: bool,
    ) -> None:
        super().__init__(program, cases)
        narrow = (*_LOW, torch.float32) if wide is torch.float64 else _LOW
        self._rounds = rounds

        def widen(found: Any) -> Any:
            if isinstance(found, torch.dtype) and found in narrow:
                return wide
            is_narrow = isinstance(found, Tensor) and found.dtype in narrow
            return found.to(wide) if is_narrow else found

        self._widen = widen

    def evaluate(self, node: Node, case: int) -> Any:
        if node in self._weights:  # as it is stored
            return super().evaluate(node, case)
        if node.op != "call_function":
            return self._widen(super().evaluate(node, case))
        if is_metadata_check(node):
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        args, kwargs = map_aggregate((args, kwargs), self._widen)
        if is_structured(node):
            return run_structured(node, args, partial(self.run_block, case=case), _call)
        if self._rounds:
            args = _rounded(node, args)
        assert callable(node.target)
        return run_number(node, case, partial(node.target, *args, **kwargs))


def _rounded(node: Node, args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments whose numbers that stand for tensors are rounded to the 16 bits of the others."""
    dtypes = [getattr(value(source), "dtype", None) for source in (*node.all_input_nodes, node)]
    low = next((dtype for dtype in dtypes if dtype in _LOW), None)
    if low is None or not isinstance(node.target, torch._ops.OpOverload):
        return tuple(args)
    kinds = [str(argument.type) for argument in node.target._schema.arguments]
    return tuple(
        torch.tensor(arg, dtype=low).item()
        if isinstance(arg, float) and ("Tensor" in kind or "number" in kind.lower())
        else arg
        for arg, kind in zip(args, kinds, strict=False)
    )


def _call(op: Any, *values: Any) -> Any:
    return op(*values)
