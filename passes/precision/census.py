"""Which dtypes a program contains, and where two float dtypes meet.

The dtype of a model is not a single thing: `model.dtype` of a T5 loaded in float16 says float16
while its `wo` is float32, and then so is every value of the residual stream from the first layer
on.  So every weight and every value is counted, and every op at which two float dtypes meet is
named with its module and its line.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
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
from enginecast.passes.ir.match import is_float_cast, op_name, real_users
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.precision.cast_borders import border_of, is_rounding
from enginecast.passes.precision.dtype_classes import (
    KEPT_HIGH,
    Class,
    classify,
    is_binding_cast,
)
from enginecast.passes.precision.inf_clamps import find_inf_clamps

Kind = Literal["parameter", "buffer", "constant", "edge"]
_KINDS: dict[InputKind, Kind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
_UNKNOWN: Mapping[str, str] = MappingProxyType({})
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
    becomes: str = ""
    """For a cast of the model's code: whether it stays in the engine, and why."""


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


def take_census(program: ExportedProgram, fates: Mapping[str, str] = _UNKNOWN) -> Census:
    """Count every weight and every value of a program, and find where float dtypes meet.

    Args:
        fates: of `cast_fates`: what becomes of casts, by the name of their node.
    """
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
    met: dict[tuple[str, str, str, str], list[str]] = {}
    for node in all_nodes(program):
        for what, by in _meetings(node):
            # Of a cast of a weight, the module of the weight's readers.
            readers = (path for user in node.users if (path := module_path(user)))
            place = module_path(node) or next(readers, "")
            at = (what, by, source_line(node), fates.get(node.name, ""))
            met.setdefault(at, []).append(place)
    return Census(
        held=tuple(Held(*key, count, elements[key]) for key, count in counts.items()),
        meetings=tuple(
            Meeting(what, by, line, len(places), tuple(dict.fromkeys(places)), becomes)
            for (what, by, line, becomes), places in met.items()
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
        yield what, PASS if border_of(node) and not is_rounding(node) else by
        return
    read = sorted({dtype_text(dtype_of(s)) for s in node.all_input_nodes if is_float(s)})
    if len(read) > 1:
        yield f"{op_name(node)} reads {' and '.join(read)}", MODEL


def cast_fates(program: ExportedProgram, kept: Set[Node], low: str) -> dict[str, str]:
    """What `unify-dtype` makes of each cast in the model's code, in words, by the node's name.

    It drops them all, and casts where the classes of values meet: so a cast stays where a value
    that it raises is read in fp32, or where it lowers one that is computed in fp32.

    Args:
        program: as unify-dtype finds it.
        kept: nodes that compute in fp32 whatever they are, as `UnifyDtype.kept` finds them.
        low: the compute dtype, as `dtype_text` has it.
    """
    classes = classify(program, frozenset(kept))
    fates: dict[str, str] = {}
    for node in all_nodes(program):
        if not is_float_cast(node) or is_binding_cast(node) or node not in classes:
            continue
        if is_rounding(node):
            fate = f"dropped: {low} throughout" if low != "f32" else "stays: rounds as the model"
        elif low == "f32":
            fate = "dropped: f32 throughout"
        elif classes.get(first_input(node)) is Class.PRECISE:
            fate = f"stays: what is computed in f32 becomes {low}"
        elif classes[node] is Class.EXACT:
            fate = "stays: f32, computed from integers"
        else:
            ends = list(_readers(node, classes))
            high = [each for each in ends if classes.get(each) in KEPT_HIGH]
            names = ", ".join(dict.fromkeys(map(op_name, high or ends)))
            what = "stays" if high else "dropped"
            fate = f"{what}: read in {'f32' if high else low} by {names or 'nothing'}"
        fates[node.name] = fate
    return fates


def _readers(node: Node, classes: Mapping[Node, Class]) -> Iterator[Node]:
    """What computes with a value that the source raised, past views and other casts."""
    for user in real_users(node):
        if classes.get(user) is Class.RAISED or is_float_cast(user):
            yield from _readers(user, classes)
        else:
            yield user
