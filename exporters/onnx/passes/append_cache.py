"""Let attention append new keys and values to a cache.

    before:  %k = aten.cat([%past_k, %new_k], 2)
             %v = aten.cat([%past_v, %new_v], 2)
             %y = enginecast.attention(%q, %k, %v, %mask, 8, 2, 0.125, False)
             return (%y, %k, %v)
    after:   %a = enginecast.cached_attention(%q, %new_k, %new_v, %past_k, %past_v, %mask, 0.125)
             return (%a[0], %a[1], %a[2])

ONNX Runtime's Attention copies a head's past and reads it right away, from the caches of the CPU,
where a Concat writes the keys of all heads first.  The translation has it read the heads of a group
together where there are few tokens.  See docs/how-it-works/passes.md for what was measured.

Any mask may stand there: the op adds it, as the attention before did, and knows no other.

Left alone: keys that are not an output, for then there is no cache; more parts than a past and new
tokens; `causal`, which counts from the first key here and from the last one where there is a past;
a mask that is computed from the joined keys.

Promises `reordered`: the same sums, but of a group's heads in one product.
"""

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    insert,
    insert_item,
    same_size,
    shape_of,
    take_place,
    value,
)
from enginecast.passes.ir.match import NoMatch, is_call
from enginecast.passes.ir.sites import SiteLog

_TOKENS = 2
"""The dim of the tokens, heads first."""


@dataclass(frozen=True)
class AppendCache(GraphPass):
    """Append new keys and values to the cache within the attention op."""

    name: ClassVar[str] = "append-cache"
    after: ClassVar[frozenset[str]] = frozenset({"fuse-attention", "legalize-onnx"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(program.graph.nodes):
            if not is_call(node, torch.ops.enginecast.attention.default):
                continue
            keys, values = arguments(node)[1:3]
            if not any(is_call(found, aten.cat.default) for found in (keys, values)):
                continue
            if log.skipped(node):
                continue
            try:
                _fuse(program, node)
            except NoMatch as miss:
                log.refused(node, miss.reason)
            else:
                log.done(node)
        return log.sites


def _fuse(program: ProgramView, node: Node) -> None:
    """Put the op in.

    Raises:
        NoMatch: it would not compute the same, or there is no cache.
    """
    query, keys, values, bias, _, _, scale, causal = arguments(node)
    if causal:
        raise NoMatch(node, "it is causal from the first key on, and the op from the last one")
    past_key, key = _parts(keys, "keys")
    past_value, new_value = _parts(values, "values")
    if not same_size(shape_of(key)[_TOKENS], shape_of(new_value)[_TOKENS]):
        raise NoMatch(values, "as many new values as new keys are expected")
    _check_readers(node, keys, values)
    graph = program.graph
    for joined in (keys, values):
        _ask_parts_for_sizes(program, joined)
    with graph.inserting_before(node):
        fused = graph.create_node(
            "call_function",
            torch.ops.enginecast.cached_attention.default,
            (query, key, new_value, past_key, past_value, bias, scale),
        )
        take_place(fused, node)
        fused.meta["val"] = tuple(map(value, (node, keys, values)))  # as they are: no new sizes
        results = [
            insert_item(graph, fused, index, like=like)
            for index, like in enumerate((node, keys, values))
        ]
    for old, new in zip((node, keys, values), results, strict=True):
        old.replace_all_uses_with(new)
        graph.erase_node(old)


def _parts(joined: Node, name: str) -> tuple[Node, Node]:
    """The past and the new tokens."""
    if not is_call(joined, aten.cat.default):
        raise NoMatch(joined, f"the {name} are not joined of a past and new ones")
    parts, dim = arguments(joined)[0], [*arguments(joined)[1:], 0][0]
    if len(shape_of(joined)) != 4 or dim % 4 != _TOKENS:
        raise NoMatch(joined, f"the {name} are joined along dim {dim}, expected the tokens")
    if len(parts) != 2:
        raise NoMatch(joined, f"the {name} are joined of {len(parts)} parts, expected 2")
    if any(dtype_of(part) != dtype_of(joined) for part in parts):
        raise NoMatch(joined, f"the {name} are joined of several dtypes")
    if not any(user.op == "output" for user in joined.users):
        raise NoMatch(joined, f"the joined {name} are not an output, so there is no cache")
    return parts[0], parts[1]


def _check_readers(node: Node, *joined: Node) -> None:
    """The op gives the joined values, so that nothing before it may read them but their sizes."""
    for found in joined:
        for user in found.users:
            before = user is not node and user.op != "output" and user < node
            if before and not is_call(user, aten.sym_size.int):
                raise NoMatch(user, f"{user.name} reads {found.name} before the attention")


def _ask_parts_for_sizes(program: ProgramView, joined: Node) -> None:
    """A size that is asked of the joined values is that of their parts."""
    past, new = arguments(joined)[0]
    for user in list(joined.users):
        if not is_call(user, aten.sym_size.int):
            continue
        dim = arguments(user)[1] % 4
        graph = program.graph
        with graph.inserting_before(user):
            size = aten.sym_size.int
            found = insert(graph, size, (new, dim), like=user)
            if dim == _TOKENS:
                before = insert(graph, size, (past, dim), like=user)
                found = insert(graph, operator.add, (before, found), like=user, replaces=True)
        user.replace_all_uses_with(found)
        graph.erase_node(user)
