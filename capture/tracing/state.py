"""State that a model keeps from call to call: an engine would drop the writes without a word.

A program shows what writes to a parameter or buffer.  A Python attribute is baked: a counter that
scales the result is a constant in the program.  So eager is called twice with equal inputs, and its
modules are looked at in between.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from enginecast.capture.python.locations import SourceLocation, is_model_code
from enginecast.errors import CaptureError, EnginecastError
from enginecast.passes.ir.blocks import all_blocks, all_nodes, blocks, operands
from enginecast.passes.ir.edit import dtype_of, first_input
from enginecast.passes.ir.traits import Trait, has, is_identity

aten = torch.ops.aten
Outputs = Mapping[str, Tensor]
Call = Callable[[nn.Module, Mapping[str, Tensor]], Outputs]

SAME = 1e-5
"""Relative L2 distance of two calls with equal inputs: kernels that add in another order from call
to call stay far below it in fp32."""
MOST_ITEMS = 1000
"""Items of a container that are looked at."""
_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: its hooks and registries."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Change:
    """An attribute that a call left different."""

    name: str
    """Dotted, from the model: `encoder.calls`."""
    how: str
    """Such as `was 0, is 1`."""
    place: str
    """`file:line` of the code that writes it; empty when that was not found."""

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"{self.name}{where} ({self.how})"


class CalledTwice:
    """Calls a module; before it does so for the first time, calls it twice to see what it keeps.

    That costs two runs on `inputs`: they should be small ones.
    """

    def __init__(self, call: Call, inputs: Mapping[str, Tensor]) -> None:
        self._call = call
        self._inputs = inputs
        self._is_done = False
        self.notes: tuple[str, ...] = ()
        """What the module's own code changes without another result, as sentences."""

    def __call__(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> Outputs:
        """Run `module` on `inputs`.

        Raises:
            CaptureError: a second call with equal inputs gives another result.
        """
        if not self._is_done:
            self._is_done = True
            self._look(module)
        return self._call(module, inputs)

    def _look(self, module: nn.Module) -> None:
        before = {
            name: (part, {key: _mark(value) for key, value in _attributes(part)})
            for name, part in module.named_modules()
        }
        try:
            first = self._call(module, _copies(self._inputs))
            changes = list(_changes(module, before))
            second = self._call(module, _copies(self._inputs))
        except EnginecastError:
            raise
        except Exception:  # it is reported when the case is run for its own sake
            return
        for name in first:
            if _differ(first[name], second[name]):
                _refuse(changes, name)
        self.notes = tuple(
            f"forward changes {change}; an engine keeps no state, and the result is the same"
            for change in changes
            if change.place  # else some library's bookkeeping
        )


def _refuse(changes: list[Change], output: str) -> None:
    if changes:
        raise CaptureError(
            "the model keeps state that changes its result: forward changes "
            f"{'; '.join(map(str, changes[:4]))}, and a second call with equal inputs gives "
            f"another {output!r}",
            hint="An engine keeps no state between calls: make it an input and return the new "
            "value.",
        )
    raise CaptureError(
        f"two calls with equal inputs give different values of {output!r}: the model draws random "
        "numbers, or keeps state outside of its modules",
        hint="Make the noise an input, or switch it off.",
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((key, value) for key, value in vars(module).items() if key not in _OWN)
    yield "training", module.training
    yield from module._buffers.items()
    yield from module._parameters.items()


@dataclass(frozen=True, eq=False)
class _Seen:
    """A tensor as it was: it equals itself while nothing was written, and an equal one."""

    tensor: Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen) or self.tensor is other.tensor:
            return isinstance(other, _Seen) and self.version == other.version
        one, two = self.tensor, other.tensor
        same_kind = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        return same_kind and torch.equal(one, two)


def _mark(value: Any, depth: int = 2) -> Any:
    """What shows that a value was replaced or written into; the value itself, of plain ones."""
    if isinstance(value, Tensor):
        return _Seen(value, value._version)
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, (list, tuple, set, frozenset, dict)) or not depth:
        return id(value)
    values = value.values() if isinstance(value, dict) else value
    items = [_mark(item, depth - 1) for item in islice(values, MOST_ITEMS)]
    keys = [*islice(value, MOST_ITEMS)] if isinstance(value, dict) else []
    return type(value), len(value), [*keys, *items]


def _changes(
    module: nn.Module, before: Mapping[str, tuple[nn.Module, dict[str, Any]]]
) -> Iterator[Change]:
    for name, part in module.named_modules():
        known, marks = before.get(name, (part, {}))
        for key, value in _attributes(part):
            was, now = marks.get(key), _mark(value)
            if known is part and key in marks and type(was) is type(now) and was == now:
                continue
            how = _how(was, value) if key in marks else f"was not set, {_now(value)}"
            yield Change(f"{name}.{key}".lstrip("."), how, _place(part, key))


def _how(mark: Any, value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, (list, dict, set, tuple)) and isinstance(mark, tuple) and len(mark) == 3:
        return f"had {mark[1]} items, has {len(value)}"
    if isinstance(value, _PLAIN) and isinstance(mark, _PLAIN):
        return f"was {mark!r}, {_now(value)}"
    return f"a {type(value).__name__}"


def _now(value: Any) -> str:
    return f"is {value!r}" if isinstance(value, _PLAIN) else f"is a {type(value).__name__}"


def _place(module: nn.Module, key: str) -> str:
    """The line that writes `self.KEY`, outside of __init__, in the classes of a module."""
    for kind in type(module).__mro__:
        if kind in (nn.Module, object):
            continue
        try:
            lines, first = inspect.getsourcelines(kind)
            file = inspect.getsourcefile(kind)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name != "__init__":
                statements = (node for node in ast.walk(function) if isinstance(node, ast.stmt))
                found = [node.lineno for node in statements if _writes(node, key)]
                if found:
                    return f"{file}:{first + min(found) - 1}"
    return ""


def _writes(node: ast.AST, key: str) -> bool:
    """Whether a statement assigns `self.KEY`, or calls one of its methods for what that does."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return isinstance(function, ast.Attribute) and _is_own(function.value, key)
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    return any(_is_own(part, key) for target in targets for part in ast.walk(target))


def _is_own(node: ast.AST, key: str) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != key:
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _differ(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return True
    if torch.equal(left, right):
        return False
    one, other = left.double().nan_to_num(), right.double().nan_to_num()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return True
    return bool((one - other).norm() > SAME * one.norm())


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def drop_idle_writes(program: ExportedProgram) -> None:
    """Drop writes of a value into itself.

    `self.table = self.table.to(x.device, x.dtype)` in a forward is traced as one, and changes
    nothing where the table has that dtype already.
    """
    for node in list(all_nodes(program)):
        if node.target is not aten.copy_.default:
            continue
        target, source = node.args[:2]
        assert isinstance(source, Node)
        if _original(source) is target:
            node.replace_all_uses_with(target)
            node.graph.erase_node(node)


def _original(node: Node) -> Node:
    """The value that a node gives as it is, or a copy of it."""
    while is_identity(node) or has(node, Trait.CASTS):
        source = first_input(node)
        if dtype_of(source) != dtype_of(node):
            break
        node = source
    return node


def compute_overwritten(program: ExportedProgram) -> tuple[str, ...]:
    """Take away writes into buffers that every call overwrites whole before it reads them.

    `self.frequencies.copy_(computed)` keeps nothing from one call to the next when nothing reads
    the buffer before: longrope does so.  What reads it later reads what was computed.

    Returns:
        Notes on these buffers, as sentences.
    """
    buffers = program.graph_signature.inputs_to_buffers
    owners = _owners(program, buffers)
    writes = list(_written(program.graph, owners))
    notes = []
    for node, owner in writes:
        buffer = node.args[0]
        assert isinstance(buffer, Node)
        is_only = buffer in owners and [name for _, name in writes].count(owner) == 1
        if node.target is aten.copy_.default and is_only and _is_whole(node, buffer):
            _compute(program, node, buffer)
            notes.append(
                f"the model overwrites its buffer {owner}{_line_of(node)} before it reads it: the "
                "engine computes it in every call"
            )
    return tuple(notes)


def _is_whole(node: Node, buffer: Node) -> bool:
    """Whether a copy fills a buffer that nothing has looked at yet."""
    source = node.args[1]
    assert isinstance(source, Node)
    if source.meta["val"].shape != buffer.meta["val"].shape:
        return False
    order = {found: index for index, found in enumerate(node.graph.nodes)}
    return all(order[user] >= order[node] for user in buffer.users)


def _compute(program: ExportedProgram, node: Node, buffer: Node) -> None:
    source, dtype = node.args[1], dtype_of(buffer)
    # A copy: an op that writes into either must not reach the other.
    copy, *to = (aten.clone.default,) if dtype_of(source) == dtype else (aten.to.dtype, dtype)
    with program.graph.inserting_before(node):
        made = program.graph.call_function(copy, (source, *to))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)
    for user in list(buffer.users):
        user.replace_input_with(buffer, made)


def refuse_mutation(program: ExportedProgram) -> None:
    """Raise CaptureError when `program` writes to a parameter or buffer, also through a view, or
    when a branch or the body of a loop writes into anything that it was given.
    """
    signature = program.graph_signature
    state = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node, owner in _written(program.graph, _owners(program, state)):
        raise CaptureError(
            f"the model writes to its own state: {node.target} changes {owner}{_line_of(node)}",
            hint="An engine keeps no state between calls: return the new value instead.",
        )
    for outer, block in all_blocks(program):
        given = {placeholder: placeholder.name for placeholder in block.placeholders}
        for node, name in _written(block.module.graph, given):
            raise CaptureError(
                f"{node.target}{_line_of(node)} writes into {name}, which the {block.path} graph of"
                f" {outer.target} is given",
                hint="Write into a copy of it: x = x.clone().",
            )


def input_writes(program: ExportedProgram) -> tuple[str, ...]:
    """Notes on inputs that `program` writes into, as sentences: an engine has copies of its own."""
    inputs = {str(name): str(name) for name in program.graph_signature.user_inputs}
    writes = list(_written(program.graph, _owners(program, inputs)))
    found = {owner: node for node, owner in reversed(writes)}
    return tuple(
        f"the model writes into its input {name!r}{_line_of(node)}; the engine leaves what the "
        "caller gave as it is"
        for name, node in found.items()
    )


def _owners(program: ExportedProgram, names: Mapping[str, str]) -> dict[Node, str]:
    """The placeholders that have these names, each with whose it is."""
    placeholders = (node for node in program.graph.nodes if node.op == "placeholder")
    return {node: names[node.name] for node in placeholders if node.name in names}


def _written(graph: Graph, owners: Mapping[Node, str]) -> Iterator[tuple[Node, str]]:
    """Each node that writes into one of the placeholders, and whose that is; within blocks, too.

    The signature does not tell before decomposition, so the in-place operators are looked at.
    """
    aliases = dict(owners)
    for node in graph.nodes:
        for block in blocks(node):
            pairs = zip(block.placeholders, operands(node), strict=True)
            given = {inner: aliases[outer] for inner, outer in pairs if outer in aliases}
            yield from _written(block.module.graph, given)
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


def _line_of(node: Node) -> str:
    """` at file:line` of the user's code; empty where torch recorded none."""
    frames = SourceLocation.in_text(node.meta.get("stack_trace") or "")
    places = [place for place in frames if is_model_code(place.file)]
    return f" at {places[-1]}" if places else ""
