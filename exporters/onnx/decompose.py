"""Write the ops that torch.onnx lacks by others, each on its own, as a trace of all would.

    before:  %h = aten.unflatten(%x, -1, [4, 32])    after:  %n = aten.sym_size(%x, 0)
                                                             %h = aten.reshape(%x, [%n, 7, 4, 32])
             %o = aten.outer(%p, %f)                         %u = aten.unsqueeze(%p, 1)
                                                             %o = aten.mul(%u, %f)

A trace of the whole program takes longer than all the rest of a conversion.  Calls that differ in
nothing but their inputs' values, as those of equal blocks do, are traced once.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from enginecast.passes.ir.blocks import is_structured
from enginecast.passes.ir.computation import call_digest
from enginecast.passes.ir.edit import aten, first_input, same_size, shape_of, tracked_outputs, value
from enginecast.passes.ir.rules import insert_graph, traced
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.ir.varying_sizes import SizeReadError, varying

_KEPT = frozenset({aten.reshape.default, aten.contiguous.default})
"""Composite views that ONNX has, too."""
_SIZES = frozenset({aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int})
_LACKED = frozenset({aten.batch_norm.default})
"""Composite ops that are not in torch.onnx's table, for they may write: a program that was made
functional has them where they do not."""
_NORM = aten._native_batch_norm_legit_no_training.default
_SIMPLE = (Trait.MOVES, Trait.ELEMENTWISE, Trait.JOINS, Trait.CASTS, Trait.METADATA)


def decompose(program: ExportedProgram, table: Mapping[Any, Any]) -> bool:
    """Decompose ops in place, where that comes to moved elements and ops on each of them.

    Other ops may contain composite ones that ONNX has: torch keeps those when it traces a program.

    Returns:
        Whether nothing is left to decompose; if something is, the program is as it was.
    """
    graphs = _graphs(program, table)
    if graphs is None:
        return False
    with tracked_outputs(program):
        for node, form in graphs.items():
            _write(program.graph, node, form)
    _merge_sizes(program.graph)
    return True


def _graphs(program: ExportedProgram, table: Mapping[Any, Any]) -> dict[Node, Graph] | None:
    """What stands for each node that is decomposed; None where that cannot be said of each."""
    found: dict[Node, Graph] = {}
    by_call: dict[str, Graph] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or not _is_decomposed(node, table):
            continue
        items = [] if isinstance(value(node), Tensor) else node.users
        if is_structured(node) or not all(user.target is operator.getitem for user in items):
            return None
        inputs = {source: f"{i} {_text(source)}" for i, source in enumerate(node.all_input_nodes)}
        call = call_digest(node, inputs)
        if call not in by_call:
            try:
                with varying(program):
                    form = traced(node, node.target, table)
            except SizeReadError:
                return None  # a trace of the whole program need not decide so
            form.eliminate_dead_code()  # an empty tensor for what a backward pass would need
            for view in form.find_nodes(op="call_function", target=aten.view.default):
                view.target = aten.reshape.default  # strides may be others once lowered
            if not all(_is_simple(made, table) for made in form.nodes):
                return None
            by_call[call] = form
        found[node] = by_call[call]
    return found


def _is_decomposed(node: Node, table: Mapping[Any, Any]) -> bool:
    """Whether a trace writes an op by others: it is in the table, or a composite view, which torch
    never keeps.
    """
    op = node.target
    if is_structured(node) or op in table or op in _LACKED:
        return True
    if not isinstance(op, torch._ops.OpOverload) or op in _KEPT:
        return False
    composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return composite and any(argument.alias_info for argument in op._schema.arguments)


def _text(node: Node) -> str:
    """All that a trace asks of an input."""
    found = value(node)
    if isinstance(found, Tensor):
        return f"{found.dtype} {tuple(found.shape)} {found.stride()}"
    return str(found)


def _is_simple(node: Node, table: Mapping[Any, Any]) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    norm = first_input(node) if node.target is operator.getitem else node
    if isinstance(value(node), torch.SymInt) or norm.target is _NORM:
        return True
    return has(node, *_SIMPLE) and not has(node, Trait.WRITES) and not _is_decomposed(node, table)


def _write(graph: Graph, node: Node, form: Graph) -> None:
    """Put a graph in the place of a node."""
    with graph.inserting_before(node):
        result = insert_graph(graph, node, form)
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for item in list(node.users):
            item.replace_all_uses_with(result[item.args[1]])
            graph.erase_node(item)
    graph.erase_node(node)


def _merge_sizes(graph: Graph) -> None:
    """Let the first node that gives a size stand for the others.

    A trace of one call may also read it off another property of its input, which ONNX has not: the
    number of elements of a vector, or a stride.
    """
    first: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.target not in _SIZES:
            continue
        size = value(node)
        if str(size) in first:
            node.replace_all_uses_with(first[str(size)])
            graph.erase_node(node)
            continue
        source = first_input(node)
        dims = [dim for dim, each in enumerate(shape_of(source)) if same_size(each, size)]
        if dims:
            node.target, node.args = aten.sym_size.int, (source, dims[0])
        first[str(size)] = node
