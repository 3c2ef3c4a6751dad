"""Compute once, at compile time, what depends on no input and no weight."""

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.passes.graph_edit import add_weight, free_name, value, weight_specs
from enginecast.passes.purity import is_pure
from enginecast.passes.sites import SiteLog
from enginecast.passes.strides import may_change_bits, take_strides
from enginecast.passes.weight_values import weight_value
from enginecast.passes.written import written_values

LARGEST = 4096
"""Elements of a folded tensor at most: beyond, computing it costs less than carrying it."""


def fold_constants(program: ExportedProgram, log: SiteLog) -> None:
    """Replace maximal constant expressions by lifted constants.

    A constant expression reads nothing but literals and lifted constants.  Parameters and buffers
    stay as they are: the exporter evaluates their expressions while it writes them.
    """
    constants = _constant_expressions(program)
    for node in list(program.graph.nodes):
        inside = node in constants and isinstance(value(node), Tensor)
        if (
            not inside
            or node.op != "call_function"
            or all(user in constants for user in node.users)
        ):
            continue
        if log.skipped(node):
            continue
        # In order, and no view: a lifted constant is stored whole.
        tensor = weight_value(program, node).clone(memory_format=torch.contiguous_format)
        name = free_name(program, f"folded.{node.name}")
        folded = add_weight(program, name, tensor, InputKind.CONSTANT_TENSOR)
        log.done(node, "fold constants")
        take_strides(node, value(folded))
        node.replace_all_uses_with(folded)
        program.graph.erase_node(node)


def _constant_expressions(program: ExportedProgram) -> set[Node]:
    lifted = {
        name
        for name, spec in weight_specs(program).items()
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    written = written_values(program.graph)
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node in written:
            continue
        known = node.name in lifted if node.op == "placeholder" else _foldable(node)
        if known and found.issuperset(node.all_input_nodes):
            found.add(node)
    _discard_strided(program, found)
    return found


def _discard_strided(program: ExportedProgram, constants: set[Node]) -> None:
    """Leave out ends of expressions whose strides matter: a lifted constant lies in order."""
    for node in reversed(program.graph.nodes):
        inside = node in constants and isinstance(value(node), Tensor)
        if not inside or node.op != "call_function":
            continue
        is_end = not constants.issuperset(node.users)
        if is_end and may_change_bits(node, value(node).contiguous()):
            constants.discard(node)


def _foldable(node: Node) -> bool:
    if node.op != "call_function" or not is_pure(node):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    found = value(node)
    several = found if isinstance(found, tuple | list) and found else [found]
    return all(isinstance(one, Tensor) and _is_small(one) for one in several)


def _is_small(tensor: Tensor) -> bool:
    return all(isinstance(size, int) for size in tensor.shape) and tensor.numel() <= LARGEST
