"""What a program computes: equal for two programs that differ in the names and order of nodes, or
in where the expressions of weights stand, or in ops that give their input, and in nothing else.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputSpec
from torch.fx import Node

from enginecast.passes.ir.deferred_weights import deferred_weight
from enginecast.passes.ir.edit import WEIGHT_KINDS, weight_tensor
from enginecast.passes.ir.text import print_ir
from enginecast.passes.ir.traits import Trait, has, is_identity


@dataclass(frozen=True)
class Computation:
    """The outputs of a program as expressions of its inputs and weights."""

    outputs: str
    """A digest of the expressions; of the whole text where a graph runs other graphs."""
    checks: frozenset[str]
    """Digests of what the program asserts."""
    weights: tuple[Tensor, ...] = field(compare=False)
    """What the digests know by its identity: as long as it is held, no other tensor has it."""


def computation(program: ExportedProgram) -> Computation:
    """What a program computes; weights count by identity, for no pass may write to them."""
    held: list[Tensor] = []
    known: dict[Node, str] = {}
    checks: set[str] = set()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            return _whole(program)
        if node.op == "placeholder":
            known[node] = _placeholder(program, specs[node.name], held)
        elif is_identity(node):
            known[node] = known[node.all_input_nodes[0]]
        else:
            known[node] = call_digest(node, known)
        if node.op == "output":
            return Computation(known[node], frozenset(checks), tuple(held))
        if has(node, Trait.CHECKS):
            checks.add(known[node])
    raise AssertionError("a graph without an output node")


def _whole(program: ExportedProgram) -> Computation:
    named = (*program.state_dict.items(), *program.constants.items())
    held = [(name, found) for name, found in named if isinstance(found, Tensor)]
    identities = [f"{name} {id(tensor)}" for name, tensor in held]
    return Computation(
        digest([print_ir(program), *identities]), frozenset(), tuple(t for _, t in held)
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
        known: what stands for each node among the arguments.
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
