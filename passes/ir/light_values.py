"""The values that a program computes only from integers, booleans and sizes: positions, masks,
indices.  They are cheap to compute, and show whether two programs that build masks differently
agree.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import Node

from enginecast.library_names import aten
from enginecast.passes.ir.deferred_weights import deferred_weight
from enginecast.passes.ir.edit import WEIGHT_KINDS, weight_tensor
from enginecast.passes.ir.effects import is_random
from enginecast.passes.ir.traits import Trait, has

Inputs = Mapping[str, Tensor]

LARGEST = 1 << 22
"""Most elements of a light value."""
LARGEST_CONSTANT = 1 << 16
"""Most elements of a light constant: larger ones are quantized weights."""


def light_values(program: ExportedProgram, cases: Sequence[Inputs]) -> dict[Node, list[Any]]:
    """The values of each light node, one per case.

    A node is light if it returns no float, and either calls a function on light nodes or reads the
    size of an input.
    """
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    values_of: dict[Node, list[Any]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = kinds[node.name]
            is_input = spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
            if is_input and all(node.name in case for case in cases):
                values_of[node] = [case[node.name] for case in cases]
            elif spec.kind in WEIGHT_KINDS and deferred_weight(program, str(spec.target)) is None:
                tensor = weight_tensor(program, spec)
                if tensor.numel() <= LARGEST_CONSTANT:
                    values_of[node] = [tensor] * len(cases)
        elif node.op == "call_function":
            if is_random(node) or has(node, Trait.CHECKS, Trait.WRITES):
                continue
            reads_size = node.target is aten.sym_size.int
            sources = node.all_input_nodes
            if all(s in values_of if reads_size else _is_light(s, values_of) for s in sources):
                values = _evaluated(node, values_of, len(cases))
                if values is not None:
                    values_of[node] = values
    return {node: values for node, values in values_of.items() if _is_light(node, values_of)}


def _is_light(node: Node, values_of: Mapping[Node, list[Any]]) -> bool:
    return node in values_of and not any(
        isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        for value in values_of[node]
    )


def _evaluated(node: Node, found: Mapping[Node, list[Any]], count: int) -> list[Any] | None:
    values: list[Any] = []
    for case in range(count):
        known = {source: found[source][case] for source in node.all_input_nodes}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
        try:
            with torch.no_grad():
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        except (IndexError, RuntimeError, TypeError, ValueError):
            return None
        if isinstance(value, Tensor):
            if value.numel() > LARGEST or value.is_floating_point() or value.is_complex():
                return None
        elif not isinstance(value, bool | int):
            return None
        values.append(value)
    return values


def value_digest(values: Sequence[Any], *, broadcast: bool = False) -> str:
    """A digest of a node's values.

    Args:
        broadcast: count values as equal if broadcasting makes them equal: a dim with equal slices
            counts as size 1, and leading dims of size 1 are dropped.
    """
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            tensor = value
            for dim, size in enumerate(value.shape if broadcast else ()):
                first = tensor.narrow(dim, 0, min(size, 1))
                if size > 1 and (tensor.stride(dim) == 0 or bool((tensor == first).all())):
                    tensor = first
            while broadcast and tensor.ndim and tensor.shape[0] == 1:
                tensor = tensor[0]
            digest.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
            # A single item is contiguous with any stride.
            flat = tensor.contiguous().cpu().as_strided([tensor.numel()], [1])
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{type(value).__name__} {value!r} ".encode())
    return digest.hexdigest()
