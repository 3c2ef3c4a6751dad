"""A normal form of what a program computes: equal for two programs that differ only in the names
and order of nodes, in where weight expressions are, or in ops that return their input.

For given cases, integers, booleans and sizes are compared by their values, and a mask by its
broadcast form.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputSpec
from torch.fx import Node

from enginecast.library_names import aten
from enginecast.passes.ir.deferred_weights import deferred_weight
from enginecast.passes.ir.edit import WEIGHT_KINDS, weight_tensor
from enginecast.passes.ir.light_values import Inputs, light_values, value_digest
from enginecast.passes.ir.text import print_ir
from enginecast.passes.ir.traits import Trait, has, is_identity


@dataclass(frozen=True)
class Computation:
    """The outputs of a program as expressions of its inputs and weights."""

    outputs: str
    """A digest of the expressions; of the whole text where a graph runs other graphs."""
    checks: frozenset[str]
    """Digests of the program's assertions."""
    weights: tuple[Tensor, ...] = field(compare=False)
    """The tensors that the digests identify by id; holding them keeps the ids unique."""
    values: Mapping[str, str] = field(compare=False, default_factory=dict)
    """The digest of each node by name; empty if a graph runs subgraphs."""


MASKED = aten.scaled_dot_product_attention.default
MASK = 3
"""Argument of `MASKED` that is broadcast to the scores."""


def computation(program: ExportedProgram, cases: Sequence[Inputs] = ()) -> Computation:
    """The normal form of a program; weights count by identity, since no pass may write to them.

    Args:
        cases: inputs; if given, the form is that of the computation on these.
    """
    held: list[Tensor] = []
    known: dict[Node, str] = {}
    light = light_values(program, cases) if cases else {}
    masks: dict[Node, str] = {}
    checks: set[str] = set()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "get_attr":  # it runs other graphs
            state = {**program.state_dict, **program.constants}
            tensors = {name: held for name, held in state.items() if isinstance(held, Tensor)}
            identities = [f"{name} {id(tensor)}" for name, tensor in tensors.items()]
            whole = digest([print_ir(program), *identities])
            return Computation(whole, frozenset(), tuple(tensors.values()))
        if node.op == "placeholder":
            known[node] = _placeholder(program, specs[node.name], held)
        elif node in light:
            known[node] = value_digest(light[node])
        elif is_identity(node) or (cases and _gives_its_input(node)):
            known[node] = known[node.all_input_nodes[0]]
        else:
            known[node] = _call(node, known, light, masks)
        if node.op == "output":
            values = {each.name: found for each, found in known.items()}
            return Computation(known[node], frozenset(checks), tuple(held), values)
        if has(node, Trait.CHECKS):
            checks.add(known[node])
    raise AssertionError("a graph without an output node")


def _gives_its_input(node: Node) -> bool:
    """Whether a node returns its input unchanged."""
    if not has(node, Trait.RESHAPES, Trait.CASTS) or len(node.all_input_nodes) < 1:
        return False
    result, given = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if node.args[0] is not node.all_input_nodes[0] or not isinstance(given, Tensor):
        return False
    return isinstance(result, Tensor) and _form(result) == _form(given)


def _form(tensor: Tensor) -> tuple[torch.dtype, tuple[str, ...]]:
    return tensor.dtype, tuple(map(str, tensor.shape))


def _call(
    node: Node,
    known: Mapping[Node, str],
    light: Mapping[Node, Sequence[Any]],
    masks: dict[Node, str],
) -> str:
    """A digest of a call, in which a broadcast argument counts by its broadcast form.

    Args:
        light: values of the nodes that are light.
        masks: digests of masks that were met before.
    """
    broadcast: Sequence[object] = ()  # what it broadcasts
    if isinstance(node.meta.get("val"), Tensor):
        if has(node, Trait.ELEMENTWISE):
            broadcast = node.args
        elif node.target is MASKED:
            mask = node.args[MASK] if len(node.args) > MASK else node.kwargs.get("attn_mask")
            names = ("query", "key", "value")
            others = [*node.args[:MASK], *(node.kwargs.get(name) for name in names)]
            broadcast = [] if mask in others else [mask]
    given = [source for source in broadcast if isinstance(source, Node) and source in light]
    if not given:
        return call_digest(node, known)
    for source in given:
        if source not in masks:
            masks[source] = value_digest(light[source], broadcast=True)
    form = repr(_form(node.meta["val"]))  # what the arguments are broadcast to
    return digest(
        [form, call_digest(node, {**known, **{source: masks[source] for source in given}})]
    )


def _placeholder(program: ExportedProgram, spec: InputSpec, held: list[Tensor]) -> str:
    if isinstance(spec.arg, ConstantArgument):
        return digest(["constant", repr(spec.arg.value)])
    if spec.kind not in WEIGHT_KINDS:
        return digest(["input", spec.arg.name])
    deferred = deferred_weight(program, str(spec.target))
    if deferred is None:
        return _weight(weight_tensor(program, spec), held)
    inner: dict[Node, str] = {}
    for node in deferred.compute.nodes:
        given = deferred.compute.tensors.get(node)
        inner[node] = call_digest(node, inner) if given is None else _weight(given, held)
    return inner[deferred.compute.nodes[-1]]


def _weight(tensor: Tensor, held: list[Tensor]) -> str:
    held.append(tensor)
    return digest(["weight", str(id(tensor))])


def call_digest(node: Node, known: Mapping[Node, str]) -> str:
    """A digest of an op and its arguments.

    Args:
        known: the digest for each node among the arguments.
    """
    target = node.target
    name = getattr(target, "__qualname__", "")
    where = f"{getattr(target, '__module__', '')} {target} {name}"
    return digest([node.op, where, _text(node.args, known), _text(node.kwargs, known)])


def _text(value: Any, known: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return known[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(each, known) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {_text(v, known)}' for k, v in sorted(value.items()))}}}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), known)}"
    return f"{type(value).__name__} {value!r}"


def digest(parts: Iterable[str]) -> str:
    """One digest of several texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
