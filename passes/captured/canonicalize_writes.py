"""The writes of a captured program, in a form in which they can be judged."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from enginecast.library_names import aten
from enginecast.passes.ir.base import CapturePass, PassContext, Site
from enginecast.passes.ir.blocks import all_nodes, blocks, operands
from enginecast.passes.ir.edit import arguments, dtype_of, first_input, insert, shape_of
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.traits import Trait, has, is_identity

_NORMS = (aten.batch_norm.default, aten.instance_norm.default)
_WHOLE = (aten.copy_.default, aten.fill_.Scalar, aten.zero_.default)


@dataclass(frozen=True)
class CanonicalizeWrites(CapturePass):
    """Drop writes without effect, and make visible those that torch's schemas hide.

    A site with a note is a buffer of that name, which every call overwrites whole before it reads
    it, as longrope does: its node computes the value, and nothing is written.
    """

    name: ClassVar[str] = "canonicalize-writes"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(all_nodes(program)):
            if any(rule(node) for rule in RULES):
                log.done(node)
        buffers = owners(program, program.graph_signature.inputs_to_buffers)
        for node, owner in list(written(program.graph, buffers)):
            buffer = node.args[0]
            assert isinstance(buffer, Node)
            if buffer in buffers and node.target in _WHOLE and _is_whole(node, buffer):
                log.done(_compute(program, node, buffer), owner)
        return log.sites


def drop_failed(node: Node) -> bool:
    """Drop a call that raised an error in the trace, which the model caught."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.users:
        return False
    is_failed = bool(node.target._schema.returns) and node.meta.get("val") is None
    if is_failed:
        node.graph.erase_node(node)
    return is_failed


def fill_numbers(node: Node) -> bool:
    """Fill where a number is copied: `tensor.copy_(5)` takes one, which no copy of ours does."""
    if node.target is not aten.copy_.default:
        return False
    target, source = node.args[:2]
    if isinstance(source, Node) and isinstance(source.meta["val"], Tensor):
        return False
    node.target, node.args, node.kwargs = aten.fill_.Scalar, (target, source), {}
    return True


def show_statistics(norm: Node) -> bool:
    """Write out what norms keep of the values that they read: torch's schemas do not say that
    `batch_norm` and `instance_norm` write into their running statistics.

        before  %y = aten.batch_norm(%x, %w, %b, %mean, %var, True, 0.1, ...)
        after   %y = aten.batch_norm(%x, %w, %b, None, None, True, 0.1, ...)
                %of_x = aten.mean(%x, [0, 2])
                %kept = aten.mul_(%mean, 0.9); %added = aten.add_(%mean, %of_x, alpha=0.1)
    """
    if norm.target not in _NORMS or not norm.args[5]:
        return False
    x, weight, bias, *kept = arguments(norm)
    if not any(isinstance(each, Node) for each in kept[:2]):
        return False
    norm.args = (x, weight, bias, None, None, *kept[2:])
    with norm.graph.inserting_after(norm):
        end = norm.graph.call_function(aten.detach.default, (x,))  # what follows goes before it
    with norm.graph.inserting_before(end):
        _keep_statistics(norm, x, kept[:2], kept[3])
    norm.graph.erase_node(end)
    return True


def _keep_statistics(norm: Node, x: Node, kept: Sequence[Node | None], momentum: float) -> None:
    """Mix mean and unbiased variance of each channel into what is kept of them."""
    add = partial(insert, norm.graph, like=norm)
    dtype = next(dtype_of(each) for each in kept if each is not None)
    if dtype_of(x) != dtype:
        x = add(aten.to.dtype, (x, dtype))
    spatial = list(range(2, len(shape_of(x))))
    by_row = norm.target is aten.instance_norm.default
    dims = spatial if by_row else [0, *spatial]
    found = (
        add(aten.mean.dim, (x, dims)),
        add(aten.var.correction, (x, dims), {"correction": 1}),
    )
    for target, each in zip(kept, found, strict=True):
        if target is None:
            continue
        new = add(aten.mean.dim, (each, [0])) if by_row else each
        add(aten.mul_.Tensor, (target, 1 - momentum))
        add(aten.add_.Tensor, (target, new), {"alpha": momentum})


def drop_idle_write(node: Node) -> bool:
    """Drop a write of a value into itself.

    `self.table = self.table.to(x.device, x.dtype)` in a forward is traced as one, and changes
    nothing where the table has that dtype already.
    """
    if node.target is not aten.copy_.default:
        return False
    target, source = node.args[:2]
    assert isinstance(source, Node)
    if _original(source) is not target:
        return False
    node.replace_all_uses_with(target)
    node.graph.erase_node(node)
    return True


def _original(node: Node) -> Node:
    """The value that a node gives as it is, or a copy of it."""
    while is_identity(node) or has(node, Trait.CASTS):
        source = first_input(node)
        if dtype_of(source) != dtype_of(node):
            break
        node = source
    return node


RULES: tuple[Callable[[Node], bool], ...] = (
    drop_failed,
    fill_numbers,
    show_statistics,
    drop_idle_write,
)
"""Each says whether it applied, at one node."""


def _is_whole(node: Node, buffer: Node) -> bool:
    """Whether a write fills a buffer that nothing has looked at yet."""
    source = node.args[1] if node.target is aten.copy_.default else None
    if isinstance(source, Node) and source.meta["val"].shape != buffer.meta["val"].shape:
        return False
    order = {found: index for index, found in enumerate(node.graph.nodes)}
    return all(order[user] >= order[node] for user in buffer.users)


def _compute(program: ExportedProgram, node: Node, buffer: Node) -> Node:
    dtype = dtype_of(buffer)
    assert dtype is not None
    call: tuple[Any, ...]
    if node.target is not aten.copy_.default:
        number = node.args[1] if len(node.args) > 1 else 0
        call = aten.full_like.default, buffer, torch.tensor(number, dtype=dtype).item()
    else:  # a copy: an op that writes into either must not reach the other
        source = node.args[1]
        same = dtype_of(source) == dtype
        call = (aten.clone.default, source) if same else (aten.to.dtype, source, dtype)
    with program.graph.inserting_before(node):
        made: Node = program.graph.call_function(call[0], call[1:])
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)
    for user in list(buffer.users):
        if user is not made:
            user.replace_input_with(buffer, made)
    return made


def owners(program: ExportedProgram, names: Mapping[str, str]) -> dict[Node, str]:
    """The placeholders that have these names, each with whose it is."""
    placeholders = (node for node in program.graph.nodes if node.op == "placeholder")
    return {node: names[node.name] for node in placeholders if node.name in names}


def written(graph: Graph, owners: Mapping[Node, str]) -> Iterator[tuple[Node, str]]:
    """Each node that writes into one of the placeholders, and whose that is; within blocks, too.

    The signature does not tell before decomposition, so the in-place operators are looked at.
    """
    aliases = dict(owners)
    for node in graph.nodes:
        for block in blocks(node):
            pairs = zip(block.placeholders, operands(node), strict=True)
            given = {inner: aliases[outer] for inner, outer in pairs if outer in aliases}
            yield from written(block.module.graph, given)
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if not isinstance(value, Node) or argument.alias_info is None:
                continue
            owner = aliases.get(value)
            if owner is not None and argument.alias_info.is_write:
                yield node, owner
            if owner is not None:
                aliases[node] = owner
