"""Functionalize in-place writes: the values stay the same, and no two of them share memory that
changes.

    before  %y = aten.mul(%x, 2)                 after  %y = aten.mul(%x, 2)
            %row = aten.select(%y, 1, 0)                %row = aten.select(%y, 1, 0)
            %low = aten.clamp_(%row, None, 20.0)        %low = aten.clamp(%row, None, 20.0)
            %z = aten.add(%y, 1)                        %y_1 = aten.select_scatter(%y, %low, 1, 0)
                                                        %z = aten.add(%y_1, 1)

A write becomes the op that does not write.  Its result is scattered into every base of the view,
and later reads of other views are taken from the new base.  So passes, exporters and the emulator
see only values, and need not ask what shares memory.

Nodes that share no memory with a written value stay as they are.  torch's own functionalization
would trace the whole program again.  It decomposes ops that may alias (reshape, matmul), and it
drops casts that mark where the source wants fp32.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from enginecast.errors import CaptureError
from enginecast.passes.ir.base import CapturePass, PassContext, Site
from enginecast.passes.ir.blocks import all_modules, is_structured
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    evaluate_fake,
    first_input,
    insert,
    is_float,
    same_shape,
    shape_of,
    value,
)
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import source_line
from enginecast.passes.ir.traits import Trait, has, is_identity

SWAPS = frozenset({"mT", "numpy_T", "swapaxes", "swapdims", "t", "transpose"})
"""Views that are their own inverse."""
SCATTERS = frozenset({"as_strided", "diagonal", "select", "slice"})
"""Views with an op of the same arguments that puts another value in their place."""

COMPLEX = {
    "view_as_complex": aten.view_as_real.default,
    "view_as_real": aten.view_as_complex.default,
}


@dataclass(frozen=True)
class Functionalize(CapturePass):
    """Turn in-place writes into values; refuse unknown ones, with their line."""

    name: ClassVar[str] = "functionalize"
    after: ClassVar[frozenset[str]] = frozenset({"canonicalize-writes"})

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for module in list(all_modules(program)):
            writes = list(filter(_writes, module.graph.nodes))
            for node in writes:
                log.done(node)
            if writes:
                _Functional(module.graph).run()
                module.recompile()
        return log.sites


def _writes(node: Node) -> bool:
    return has(node, Trait.WRITES)


class _Functional:
    """Walks a graph once, and knows at every node what holds the value of each view then."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.parents = dict(_views(graph))
        """What each view shows a part of."""
        self.written = {self.root(n) for node in graph.nodes for n in written_arguments(node)}
        self.writes: dict[Node, int] = dict.fromkeys(self.written, 0)
        """How often the memory of a root has been written."""
        self.holders: dict[Node, tuple[int, Node]] = {}
        """After how many writes which node held the value of this one."""
        self.split: dict[Node, dict[Node, int]] = {}
        """The writes before an op that gives several views: each is as old as the op."""
        self.named: dict[Node, dict[Node, Node]] = {}
        """What the arguments of a node were called before they were others."""
        self.made: set[Node] = set()

    def root(self, node: Node) -> Node:
        while node in self.parents:
            node = self.parents[node]
        return node

    def run(self) -> None:
        for node in list(self.graph.nodes):
            self.graph.inserting_before(node)
            if _writes(node):
                self._write(node)
            else:
                self._read(node)
        for node in reversed(list(self.graph.nodes)):
            is_spare = _writes(node) or node in self.parents or node in self.made
            if is_spare and not node.users:
                self.graph.erase_node(node)

    def _read(self, node: Node) -> None:
        """Let a node read what its arguments hold now."""
        if node.target is operator.getitem and node in self.parents:
            self.holders[node] = self.split[first_input(node)].get(self.root(node), 0), node
            return
        for source in node.all_input_nodes:
            now = self.now(source)
            if now is not source:
                node.replace_input_with(source, now)
                self.named.setdefault(node, {})[now] = source
                _loosen(node)
        self.split[node] = dict(self.writes)
        self.holders[node] = self.writes.get(self.root(node), 0), node

    def now(self, node: Node) -> Node:
        """The node that holds the value of this one, made where none does."""
        root = self.root(node)
        if root not in self.written:
            return node
        count, holder = self.holders[node]
        if count == self.writes[root]:
            return holder
        if _writes(node):
            holder = self.now(self.parents[node])
        elif node.target is operator.getitem:
            whole = self._again(first_input(node))
            holder = self._made(operator.getitem, (whole, node.args[1]), like=node)
        else:
            holder = self._again(node)
        self.holders[node] = self.writes[root], holder
        return holder

    def _again(self, node: Node) -> Node:
        """A copy of a node that reads what its arguments hold now."""
        if is_identity(node):
            return self.now(self.parents[node])
        names = self.named.get(node, {})
        made = self.graph.node_copy(node, lambda source: self.now(names.get(source, source)))
        if node.target is aten.as_strided.default:
            self._require_strides(node, self.parents[node], first_input(made))
        _loosen(made)
        made.meta["val"] = evaluate_fake(made)
        self.made.add(made)
        return made

    def _made(
        self, op: Callable[..., Any], args: tuple[Any, ...], *, like: Node, **kwargs: Any
    ) -> Node:
        made = insert(self.graph, op, args, kwargs, like=like)
        self.made.add(made)
        return made

    def _write(self, node: Node) -> None:
        """Compute what an op would have written, and put it where it belongs."""
        targets = written_arguments(node)
        if torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            self._reshape(node, targets[0])
            return
        olds = [self.now(target) for target in targets]
        news = self._computed(node, olds)
        for target, old, new in zip(targets, olds, news, strict=True):
            if not same_shape(shape_of(new), shape_of(old)):
                raise _refusal(node, f"the shape of {target.name} would change")
            if dtype_of(new) != dtype_of(old):
                new = self._made(aten.to.dtype, (new, dtype_of(old)), like=node)
            self._put(target, new, node)
        if node in self.parents:
            self.holders[node] = -1, node

    def _put(self, target: Node, new: Node, write: Node) -> None:
        """Let a value, and all that it is a view of, be another one from here on."""
        found = [(target, new)]
        node, views = target, []
        while node in self.parents:
            parent = self.parents[node]
            views.append(node)
            whole = self.now(parent)
            back = self._put_back(node, whole, new, write)
            if back is None:  # a view may show an element twice, of which one place is written
                back = self._placed(views, whole, found[0][1], write)
                del found[1:]
            new, node = back, parent
            found.append((node, new))
        self.writes[node] += 1
        for shown, holder in found:
            self.holders[shown] = self.writes[node], holder

    def _computed(self, node: Node, olds: list[Node]) -> list[Node]:
        """What an op writes, as values of their own."""
        name = _name(node)
        args: Any = torch.fx.map_arg(node.args, self.now)
        kwargs = torch.fx.map_arg(node.kwargs, self.now)
        if name == "copy_" or (name == "fill_" and isinstance(args[1], Node)):
            return [self._spread(args[1], olds[0], node)]
        if name in ("zero_", "fill_"):
            kind = float if is_float(olds[0]) else bool if dtype_of(olds[0]) is torch.bool else int
            fill = (olds[0], kind(args[1] if name == "fill_" else 0))
            return [self._made(aten.full_like.default, fill, like=node)]
        if name == "fill_diagonal_" and len(shape_of(olds[0])) == 2 and True not in args[2:]:
            line = self._made(aten.diagonal.default, (olds[0],), like=node)
            filled = self._made(aten.full_like.default, (line, args[1]), like=node)
            return [self._made(aten.diagonal_scatter.default, (olds[0], filled), like=node)]
        op, outs = _without_writes(node)
        kept = {key: value for key, value in kwargs.items() if key not in outs}
        made = self._made(op, args, like=node, **kept)
        if isinstance(value(made), Tensor):
            return [made]
        pairs = range(len(olds))
        return [self._made(operator.getitem, (made, index), like=node) for index in pairs]

    def _spread(self, source: Node, target: Node, like: Node) -> Node:
        """A value in the dtype and the shape of another."""
        if dtype_of(source) != dtype_of(target):
            source = self._made(aten.to.dtype, (source, dtype_of(target)), like=like)
        if not same_shape(shape_of(source), shape_of(target)):
            source = self._made(aten.expand_as.default, (source, target), like=like)
        return source

    def _reshape(self, node: Node, target: Node) -> None:
        """`x.unsqueeze_(0)`: x is another view of its memory from here on."""
        if _name(node) in ("resize_", "set_"):
            raise _refusal(node, "it gives a tensor other memory")
        op, _ = _without_writes(node)
        view = self._made(op, (self.now(target), *node.args[1:]), like=node, **node.kwargs)
        self.parents[view], self.parents[node] = target, view  # readers go by the newest name
        self.holders[view] = self.writes[self.root(view)], view
        self.holders[node] = -1, node

    def _put_back(self, view: Node, whole: Node, part: Node, write: Node) -> Node | None:
        """The value that a view shows a part of, with another part; None where no op gives it."""
        if is_identity(view) or _writes(view) or has(view, Trait.CASTS):
            return part
        if view.target is operator.getitem:
            return self._joined(view, part, write)
        name = _name(view)
        if name in SCATTERS:
            if name == "as_strided":
                self._require_strides(write, self.parents[view], whole)
            op, rest = getattr(aten, f"{name}_scatter").default, view.args[1:]
            return self._made(op, (whole, part, *rest), like=write, **view.kwargs)
        return self._turned_back(view, whole, part, write)

    def _turned_back(self, view: Node, whole: Node, part: Node, write: Node) -> Node | None:
        """The value that a view shows all of in another order or shape; None where it does not."""
        name, rest = _name(view), arguments(view)[1:]
        if has(view, Trait.RESHAPES):
            return self._made(aten.reshape_as.default, (part, whole), like=write)
        if name in SWAPS:
            assert isinstance(view.target, torch._ops.OpOverload)
            return self._made(view.target, (part, *rest), like=write, **view.kwargs)
        if name == "permute":
            dims = [dim % len(rest[0]) for dim in rest[0]]
            order = [dims.index(dim) for dim in range(len(dims))]
            return self._made(aten.permute.default, (part, order), like=write)
        if name in COMPLEX:
            return self._made(COMPLEX[name], (part,), like=write)
        return part if name == "expand" and same_shape(shape_of(part), shape_of(whole)) else None

    def _joined(self, item: Node, part: Node, write: Node) -> Node:
        """The value that was split into parts, one of which is another now."""
        split = first_input(item)
        if same_shape(shape_of(item), shape_of(self.parents[item])):  # of broadcast_tensors
            return part
        if not _name(split).startswith(("unbind", "split", "chunk", "tensor_split", "unsafe_")):
            raise _refusal(write, f"it writes into a part of {_name(split)}")
        again = self._again(split)
        parts = [
            part
            if index == item.args[1]
            else self._made(operator.getitem, (again, index), like=item)
            for index in range(len(value(split)))
        ]
        has_sizes = _name(split) not in ("unbind",)
        position = 2 if has_sizes else 1
        dim = split.args[position] if len(split.args) > position else split.kwargs.get("dim", 0)
        op = aten.cat.default if has_sizes else aten.stack.default
        return self._made(op, (parts, dim), like=write)

    def _placed(self, views: list[Node], whole: Node, part: Node, write: Node) -> Node:
        """Put the elements where views of the positions, the innermost last, say they belong."""
        ones = self._made(aten.ones_like.default, (whole,), like=write, dtype=torch.int64)
        count = self._made(
            aten.cumsum.default,
            (self._made(aten.flatten.using_ints, (ones,), like=write), 0),
            like=write,
        )
        places = self._made(aten.sub.Tensor, (count, 1), like=write)
        shown = self._made(aten.reshape_as.default, (places, whole), like=write)
        for view in reversed(views):
            if is_identity(view) or _writes(view):
                continue
            tensors = [n for n in view.all_input_nodes if isinstance(value(n), Tensor)]
            is_other = has(view, Trait.CASTS) or has(view, Trait.STRIDE_BOUND)
            if is_other or len(tensors) != 1:
                raise _refusal(write, f"it writes into a view by {_name(view)}")
            shown = self._shown(view, tensors[0], shown)
        return self._made(aten.put.default, (whole, shown, part), like=write)

    def _shown(self, view: Node, source: Node, places: Node) -> Node:
        """What a view shows of other values than those of its source."""
        made = self.graph.node_copy(view, lambda node: places if node is source else node)
        _loosen(made)
        made.meta["val"] = evaluate_fake(made)
        self.made.add(made)
        return made

    def _require_strides(self, node: Node, before: Node, after: Node) -> None:
        """Strides that the source states have to mean the same."""
        if list(map(str, value(before).stride())) != list(map(str, value(after).stride())):
            raise _refusal(node, "as_strided reads memory that another op writes")


def _views(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Every node that shares memory with one that it reads, and that one.

    Whether reshape, contiguous or to share it depends on strides and dtypes: torch is asked, for
    what may share memory with a written value.
    """
    near = _near_writes(graph)
    for node in graph.nodes:
        if node not in near or node.op != "call_function" or is_structured(node):
            continue
        if _writes(node):
            yield from ((node, target) for target in written_arguments(node)[:1])
            continue
        is_item = node.target is operator.getitem
        call = first_input(node) if is_item else node
        if not has(call, Trait.ALIASES) or _writes(call):
            continue
        found = evaluate_fake(call)
        found = found[node.args[1]] if is_item else found
        for source in call.all_input_nodes:
            if _share_memory(found, value(source)):
                yield node, source
                break


def _near_writes(graph: Graph) -> set[Node]:
    """What may share memory with a written value, by the ops on the way."""
    beside: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        call = first_input(node) if node.target is operator.getitem else node
        if _writes(node) or has(call, Trait.ALIASES):
            for source in {call, *call.all_input_nodes} - {node}:
                beside.setdefault(node, []).append(source)
                beside.setdefault(source, []).append(node)
    found = {target for node in graph.nodes for target in written_arguments(node)}
    waiting = list(found)
    while waiting:
        for other in beside.get(waiting.pop(), ()):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def _share_memory(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def written_arguments(node: Node) -> list[Node]:
    """The arguments that a node writes into."""
    if not _writes(node):
        return []
    found: list[object] = []
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs[argument.name]
            found += given if isinstance(given, list | tuple) else [given]
    return [each for each in found if isinstance(each, Node)]


def _without_writes(node: Node) -> tuple[Callable[..., Any], frozenset[str]]:
    """The op that gives what this one writes, and the arguments that it does not take."""
    op = node.target
    assert isinstance(op, torch._ops.OpOverload)
    outs = frozenset(a.name for a in op._schema.arguments if a.is_out)
    wanted = [str(a.type) for a in op._schema.arguments if a.name not in outs]
    packet = getattr(getattr(torch.ops, op.namespace), _name(node).removesuffix("_"), None)
    names = packet.overloads() if packet is not None else []
    for name in sorted(names, key=lambda name: name != op._overloadname):
        other: torch._ops.OpOverload = getattr(packet, name)
        given = [str(a.type) for a in other._schema.arguments]
        if given[: len(wanted)] == wanted and not other._schema.is_mutable:
            return other, outs
    raise _refusal(node, "no op of torch's gives what it writes")


def _name(node: Node) -> str:
    """The name of an op, whatever its overload: `select`."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", str(node.target))
    return node.target._schema.name.rpartition("::")[2]


def _loosen(node: Node) -> None:
    """A view states how memory lies; a value has no memory that others know."""
    if node.target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default


def _refusal(node: Node, reason: str) -> CaptureError:
    place = source_line(node)
    return CaptureError(
        f"{node.target}{f' at {place}' if place else ''} writes in place, and {reason}",
        hint="Compute a new value instead: x = x.clone() before the write, or torch.where.",
    )
