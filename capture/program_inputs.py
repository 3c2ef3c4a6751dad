"""Inputs of a program that was captured elsewhere, as far as the program tells."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from enginecast.capture.inputs import BATCH, SEQUENCE, DimSpec, InputSpec, kind_of
from enginecast.capture.shapes import input_values, symbol_range


def program_inputs(program: ExportedProgram) -> tuple[InputSpec, ...]:
    """Names, kinds, dtypes and dimensions of the inputs.

    Dimensions of text and images are called batch and sequence, as in a capture of ours; others
    keep the program's symbols.
    Values of integer inputs range as the table that they index (token ids), else as the example
    that was saved with the program, else over 0 and 1.
    """
    values = input_values(program)
    examples = dict(zip(values, pytree.tree_leaves(program.example_inputs or ()), strict=False))
    names = _symbol_names(values)
    specs = []
    for name, value in values.items():
        dims = tuple(_dim(program, size, names) for size in value.shape)
        low, high = _value_range(program, name, value, examples.get(name))
        specs.append(InputSpec(name, kind_of(name, value), value.dtype, dims, low, high))
    return tuple(specs)


def _symbol_names(values: Mapping[str, Tensor]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name, value in values.items():
        kind = kind_of(name, value)
        known = {"tensor": (), "image": (BATCH,)}.get(kind, (BATCH, SEQUENCE))
        for size, dim_name in zip(value.shape, known, strict=False):
            if isinstance(size, torch.SymInt) and dim_name not in names.values():
                names.setdefault(str(size.node.expr), dim_name)
    return names


def _dim(program: ExportedProgram, size: int | torch.SymInt, names: Mapping[str, str]) -> DimSpec:
    if isinstance(size, int):
        return DimSpec.static(size)
    minimum, maximum = symbol_range(program, size.node.expr)
    minimum = max(minimum, 1)
    hint = size.node.hint if size.node.has_hint() else min(max(minimum, 2), maximum)
    symbol = str(size.node.expr)
    return DimSpec(names.get(symbol, symbol), hint, minimum, maximum)


def _value_range(
    program: ExportedProgram, name: str, value: Tensor, example: object
) -> tuple[int | None, int | None]:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        return None, None
    node = next(node for node in program.graph.nodes if node.name == name)
    rows = [_rows(user, node) for user in node.users]
    tables = [count for count in rows if count is not None]
    if tables:
        return 0, min(tables) - 1
    if isinstance(example, Tensor) and example.numel() and kind_of(name, value) == "tensor":
        return int(example.min()), int(example.max())
    return 0, 1


def _rows(user: Node, indices: Node) -> int | None:
    """Rows of the table that `user` looks `indices` up in; None when it does something else."""
    if user.target is not torch.ops.aten.embedding.default or user.args[1] is not indices:
        return None
    table = user.args[0]
    assert isinstance(table, Node)
    rows: int = table.meta["val"].shape[0]
    return rows
