"""Which dtypes a program contains, and where two float dtypes meet.

The dtype of a model is not a single thing: `model.dtype` of a T5 loaded in float16 says float16
while its `wo` is float32, and then so is every value of the residual stream from the first layer
on.  So every weight and every value is counted, and every op at which two float dtypes meet is
named with its module and its line.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.passes.ir.blocks import all_nodes, is_structured
from enginecast.passes.ir.edit import (
    dtype_of,
    first_input,
    is_float,
    value,
    weight_specs,
    weight_tensor,
)
from enginecast.passes.ir.match import is_float_cast, op_name
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.precision.cast_borders import border_of
from enginecast.passes.precision.dtype_classes import is_binding_cast
from enginecast.passes.precision.inf_clamps import find_inf_clamps

Kind = Literal["parameter", "buffer", "constant", "edge"]
_KINDS: dict[InputKind, Kind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
MODEL, CAPTURE, PASS = "the model's code", "a weight stored so", "a pass"


@dataclass(frozen=True)
class Held:
    """What one module holds of one kind in one dtype."""

    kind: Kind
    """An edge is a value that the module computes; inputs are edges of the root."""
    dtype: str
    module: str
    """Dotted path; "" for the root."""
    count: int
    elements: int
    """Of weights; 0 for edges, whose sizes vary."""


@dataclass(frozen=True)
class Meeting:
    """Float dtypes that meet at one line of the source, in one way."""

    what: str
    """ "cast f16 -> f32", "mul.Tensor reads f16 and f32", or "cast to f32 of what is f32": one
    that does something in other dtypes only."""
    by: str
    """Who wrote it: the model's code, capture (for a weight stored in that dtype), or a pass."""
    source: str
    """file:line of the model's code; empty for a cast of a weight."""
    count: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Clamp:
    """A clamp of an fp16 value to fp16's range that was baked into the program."""

    module: str
    source: str


@dataclass(frozen=True)
class Census:
    """The dtypes of a program."""

    held: tuple[Held, ...]
    meetings: tuple[Meeting, ...]
    clamps: tuple[Clamp, ...]


def take_census(program: ExportedProgram) -> Census:
    """Count every weight and every value of a program, and find where float dtypes meet."""
    counts: Counter[tuple[Kind, str, str]] = Counter()
    elements: Counter[tuple[Kind, str, str]] = Counter()
    weights = weight_specs(program)
    for spec in weights.values():
        tensor = weight_tensor(program, spec)
        key = _KINDS[spec.kind], dtype_text(tensor.dtype), str(spec.target).rpartition(".")[0]
        counts[key] += 1
        elements[key] += tensor.numel()
    for node in all_nodes(program):
        if node.op not in ("placeholder", "call_function") or node.name in weights:
            continue
        fake = value(node)
        for each in fake if isinstance(fake, tuple | list) else (fake,):
            if isinstance(each, Tensor):
                counts["edge", dtype_text(each.dtype), module_path(node)] += 1
    met: dict[tuple[str, str, str], list[str]] = {}
    for node in all_nodes(program):
        for what, by in _meetings(node):
            # Of a cast of a weight, the module of the weight's readers.
            readers = (path for user in node.users if (path := module_path(user)))
            place = module_path(node) or next(readers, "")
            met.setdefault((what, by, source_line(node)), []).append(place)
    return Census(
        held=tuple(Held(*key, count, elements[key]) for key, count in counts.items()),
        meetings=tuple(
            Meeting(*key, len(places), tuple(dict.fromkeys(places))) for key, places in met.items()
        ),
        clamps=tuple(
            Clamp(module_path(clamp.node), source_line(clamp.node))
            for clamp in find_inf_clamps(program)
        ),
    )


def _meetings(node: Node) -> Iterator[tuple[str, str]]:
    if node.op != "call_function" or is_structured(node):
        return
    if is_float_cast(node):
        source, wanted = dtype_text(dtype_of(first_input(node))), dtype_text(dtype_of(node))
        same = f"cast to {wanted} of what is {wanted}"
        by = CAPTURE if is_binding_cast(node) else MODEL
        what = same if source == wanted else f"cast {source} -> {wanted}"
        yield what, PASS if border_of(node) else by
        return
    read = sorted({dtype_text(dtype_of(s)) for s in node.all_input_nodes if is_float(s)})
    if len(read) > 1:
        yield f"{op_name(node)} reads {' and '.join(read)}", MODEL
