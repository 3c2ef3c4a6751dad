"""Rules for shapes: each size has a range that TensorRT accepts.  The range of "2*sequence + 1"
follows from its symbols.

Sources: https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/inference-library/work-dynamic-shapes.html
(a least, best and greatest size of each dynamic dimension); the operators' pages for the volume,
such as https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/operators/NonZero.html.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import onnx_ir as ir

from enginecast.exporters.tensorrt.gate.violations import Violation, at, of_value
from enginecast.runtime.bundle.manifest import Input

Ranges = Mapping[str, tuple[int, int]]
Bounds = tuple[float, float]
_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_CALLS: Mapping[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "floor": math.floor,
    "ceil": math.ceil,
    "ceiling": math.ceil,
    "abs": abs,
    "trunc": math.trunc,
}
MOST_ELEMENTS = 2**31 - 1
"""That a tensor may have."""
MOST_SORTED = 3840
"""Elements that TopK gives: its K."""


def check_ranges(graph: ir.Graph, ranges: Ranges) -> Iterator[Violation]:
    """Each symbol of the inputs has a range that ends."""
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
            elif not 0 <= found[0] <= found[1] <= MOST_ELEMENTS:
                expected = f"sizes of dimension {axis} from 0 to an end"
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


def check_volumes(graph: ir.Graph, ranges: Ranges) -> Iterator[Violation]:
    """No tensor can become larger than TensorRT's layers take."""
    for value in _values(graph):
        most = volume(value.shape, ranges)
        if most is not None and most > MOST_ELEMENTS:
            expected = f"at most {MOST_ELEMENTS:,} elements"
            yield of_value(value, "volume", expected, f"{most:,} of {value.name} {value.shape}")


def check_orders(graph: ir.Graph, ranges: Ranges) -> Iterator[Violation]:
    """What is sorted is short in all the ranges: a plan may be built that fails on the rest."""
    for node in graph.all_nodes():
        shape = node.outputs[0].shape if node.op_type == "TopK" else None
        if shape is None:
            continue
        size = shape[node.attributes.get_int("axis", -1)]
        found = bounds(size, ranges)
        if found is not None and found[1] > MOST_SORTED:
            got = f"{size}, up to {found[1]:.0f}"
            yield at(node, "limit", f"at most {MOST_SORTED} elements of an order", got)


def unknown_sizes(graph: ir.Graph, ranges: Ranges) -> int:
    """Of how many tensors the largest size is not known."""
    return sum(volume(value.shape, ranges) is None for value in _values(graph))


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def _sizes(value: ir.Value) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size.value) for size in value.shape or ())


def _input(name: str | None, rule: str, expected: str, got: str) -> Violation:
    return Violation(rule, name or "", "", "", "", expected, got)


def bounds(size: int | ir.SymbolicDim, ranges: Ranges) -> Bounds | None:
    """Least and greatest of a dimension, or numbers outside of them where a symbol occurs twice.

    None: it is not known, has a symbol without a range, or is written in a way that is not read.
    """
    if isinstance(size, int):
        return size, size
    try:
        parsed = ast.parse(str(size.value), mode="eval")
        return _evaluate(parsed.body, ranges)
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError, OverflowError):
        return None


def volume(shape: ir.Shape | None, ranges: Ranges) -> int | None:
    """The most elements that a tensor of this shape can have; None: that is not known."""
    if shape is None:
        return None
    most = 1
    for size in shape:
        found = bounds(size, ranges)
        if found is None or not math.isfinite(found[1]):
            return None
        most *= max(int(found[1]), 0)
    return most


def _evaluate(node: ast.AST, ranges: Ranges) -> Bounds:
    """Bounds of an expression.

    Raises:
        KeyError: a symbol has no range, or what it is is not known here.
    """
    match node:
        case ast.Constant(value=int() | float() as number):
            return number, number
        case ast.Name(id=name):
            return ranges[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            least, most = _evaluate(operand, ranges)
            return -most, -least
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            _evaluate(left, ranges)
            return 0, max(_evaluate(right, ranges)[1] - 1, 0)
        case ast.BinOp(left=left, op=op, right=right):
            return _corners(_BINARY[type(op)], _evaluate(left, ranges), _evaluate(right, ranges))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _corners(_CALLS[name.lower()], *(_evaluate(a, ranges) for a in args))
    raise KeyError(type(node).__name__)


def _corners(function: Callable[..., float], *given: Bounds) -> Bounds:
    """Of a function that grows or falls with each of its arguments."""
    values = [function(*numbers) for numbers in product(*given)]
    return min(values), max(values)
