"""Refuse values that OpenVINO's CPU plugin would silently compute in a narrower dtype: int64 in
int32, and fp64 in fp32.

The range of an integer follows from those of the inputs, step by step.  What a float was rounded
to, and what an op gives that is not listed, is taken to be within int32: where it is not, the
engine differs from eager when it is compared.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from enginecast.errors import LoweringError
from enginecast.exporters.target import LoweringRequest
from enginecast.passes.analyses.ranges import largest_size
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.deferred_weights import deferred_weights
from enginecast.passes.ir.edit import arguments, dtype_of, shape_of, weight_specs
from enginecast.passes.ir.source import call_place
from enginecast.passes.ir.traits import Trait, has

Range = tuple[float, float]
INT32: Range = (-(2.0**31), 2.0**31 - 1)


def require_numbers(request: LoweringRequest) -> None:
    """Look at every value of a program.

    Raises:
        LoweringError: one is of fp64, or an int64 that may leave int32; names it with its line.
    """
    ranges = _known(request)
    for node in all_nodes(request.program):
        if dtype_of(node) == torch.float64:
            raise LoweringError(
                f"OpenVINO computes fp64 in fp32: {_place(node)}",
                hint="Use --target onnxruntime, or compute in fp32.",
            )
        if dtype_of(node) != torch.int64:
            continue
        found = ranges.setdefault(node, _range_of(node, ranges))
        if found is not None and not (INT32[0] <= found[0] and found[1] <= INT32[1]):
            raise LoweringError(
                "OpenVINO computes int64 in int32, and values may be"
                f" {found[0]:.4g}..{found[1]:.4g} at {_place(node)}",
                hint="Use --target onnxruntime, or give inputs a smaller range (--values).",
            )


def _place(node: Node) -> str:
    return f"'{node.name}'" if node.op == "placeholder" else call_place(node)


def _known(request: LoweringRequest) -> dict[Node, Range | None]:
    """The ranges of inputs and weights."""
    program = request.program
    inputs = {spec.name: (spec.minimum, spec.maximum) for spec in request.inputs}
    weights, specs = deferred_weights(program), weight_specs(program)
    found: dict[Node, Range | None] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        if dtype_of(node) != torch.int64:
            continue
        if node.name in specs:
            weight = weights[str(specs[node.name].target)].compute()
            ends = (float(weight.min()), float(weight.max())) if weight.numel() else None
            found[node] = ends
        else:
            low, high = inputs.get(node.name, (None, None))
            found[node] = None if low is None or high is None else (low, high)
    return found


def _range_of(node: Node, ranges: Mapping[Node, Range | None]) -> Range | None:
    """The range of an int64 value; None: nothing is known."""

    def of(argument: Any) -> Range | None:
        if isinstance(argument, bool | int | float):
            return float(argument), float(argument)
        if dtype_of(argument) == torch.bool:
            return 0.0, 1.0
        return ranges.get(argument) if isinstance(argument, Node) else None

    args = arguments(node)
    if has(node, Trait.MOVES, Trait.GATHERS, Trait.CASTS):
        return of(args[0])
    joined = has(node, Trait.JOINS) and isinstance(args[0], list | tuple)
    given = [of(argument) for argument in (args[0] if joined else args)]
    known = [found for found in given if found is not None]
    if joined:
        return _around(*known) if len(known) == len(given) else None
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    if name in _SUMS and known:
        low, high = known[0]
        most = _elements(args[0])
        return min(low, low * most), max(high, high * most)
    if has(node, Trait.NOT_LARGER) and known:  # and of another sign
        most = max(map(abs, known[0]))
        return -most, most
    rule = _RULES.get(name)
    if rule is None or len(known) < 2 or len(known) < len(given) or node.kwargs:
        return None
    return rule(*known)


def _elements(source: Any) -> float:
    """How many elements are added at most."""
    sizes = [size if isinstance(size, int) else largest_size(size) for size in shape_of(source)]
    return math.prod(sizes)


def _around(*ranges: Range) -> Range:
    """What holds all of them."""
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _by_ends(compute: Callable[[float, float], float]) -> Callable[[Range, Range], Range]:
    """A rule for what is largest and smallest where its operands are."""

    def rule(left: Range, right: Range) -> Range:
        found = [compute(one, other) for one in left for other in right]
        return min(found), max(found)

    return rule


def _shifted(number: float, places: float) -> float:
    return number * math.pow(2, min(places, 64))


def _power(base: Range, exponent: Range) -> Range:
    most = max(abs(base[0]), abs(base[1])) ** min(exponent[1], 64)
    return (-most if base[0] < 0 else 0.0), most


_SUMS = frozenset({"sum", "cumsum"})
_RULES: Mapping[str, Callable[..., Range]] = {
    "add": _by_ends(lambda one, other: one + other),
    "sub": _by_ends(lambda one, other: one - other),
    "rsub": _by_ends(lambda one, other: other - one),
    "mul": _by_ends(lambda one, other: one * other),
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), _by_ends(_shifted)),
    "pow": _power,
    "where": lambda condition, one, other: _around(one, other),
    "masked_fill": lambda source, mask, fill: _around(source, fill),
    "maximum": _around,
    "minimum": _around,
    "clamp": _around,
    "remainder": lambda left, right: _around((0.0, 0.0), right),
}
"""Of ops that may leave int32, and that keep what is known."""
