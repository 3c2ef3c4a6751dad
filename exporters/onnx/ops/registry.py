"""Where each op's form in ONNX is registered, by a decorator on the function that says it.

    @form(aten.log1p.default)               in ops of ONNX: torch.onnx calls it to write the op
    def _log1p(x): ...

    @torch_form(aten.gru_cell.default)      in ops of torch: legalize-onnx traces it
    def _gru_cell(x, hidden, ...): ...

    @rewrite(aten.group_norm.default)       as a change of the graph, by legalize-onnx as well
    def _group_norm(program, node): ...

    refuse(aten.histc.default, when=_has_one_bin, reason="...")

An op that nothing here names is written as torch.onnx says it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import LoweringError
from enginecast.ops.rules import Rules
from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import fake_mode, value
from enginecast.passes.ir.rules import Rewrite, insert_traced
from enginecast.passes.ir.source import call_place

Reader = Literal["onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "openvino"]
"""Who will read an ONNX graph: they are fast with different ops."""
READERS: tuple[Reader, ...] = get_args(Reader)
ONNXRUNTIME: Sequence[Reader] = ("onnxruntime-cpu", "onnxruntime-cuda")
PLAIN: Sequence[Reader] = ("tensorrt", "openvino")
"""They get ops of ONNX's own alone."""
ON_CPU: Sequence[Reader] = ("onnxruntime-cpu",)
NOT_ON_CPU: Sequence[Reader] = ("onnxruntime-cuda", *PLAIN)

Form = Callable[..., Any]
Condition = Callable[[Node], bool]
Step = Literal["fourier", "complex", "plain"]
"""Transforms come first, then complex values are taken apart: what stands for them is legalized in
turn."""
Function = TypeVar("Function", bound=Callable[..., Any])

FORMS: Mapping[Reader, Rules[Form]] = {reader: Rules() for reader in READERS}
"""Op -> what it is in ONNX, for each reader.  An op of another package is a string,
"torchvision::nms": it is there once that package was imported."""
REWRITES: dict[Any, list["Rewriting"]] = {}
REFUSALS: dict[Any, list[tuple[Condition, str]]] = {}
"""Op -> which calls of it are refused, and why."""
ANOTHER_OP = "Replace the op in the model, or take it out with a pass."


@dataclass(frozen=True)
class Rewriting:
    """What becomes of some calls of an op before it is written."""

    rule: Rewrite
    when: Condition
    readers: Sequence[Reader]
    step: Step


def form(*ops: Any, readers: Sequence[Reader] = READERS) -> Callable[[Function], Function]:
    """Register the decorated function, over ops of ONNX, for these ops of torch."""

    def register(function: Function) -> Function:
        for reader in readers:
            assert not FORMS[reader].keys() & set(ops), f"{ops} has two forms"
            FORMS[reader].rule(*ops)(function)
        return function

    return register


def rewrite(
    *ops: Any,
    when: Condition = lambda _: True,
    readers: Sequence[Reader] = READERS,
    step: Step = "plain",
) -> Callable[[Function], Function]:
    """Register the decorated `Rewrite` for these ops.

    Args:
        when: which calls it is for.
    """

    def register(function: Function) -> Function:
        for op in ops:
            REWRITES.setdefault(op, []).append(Rewriting(function, when, readers, step))
        return function

    return register


def torch_form(
    *ops: Any,
    when: Condition = lambda _: True,
    readers: Sequence[Reader] = READERS,
    step: Step = "plain",
) -> Callable[[Function], Function]:
    """Register the decorated function, over ops of torch, for these ops."""

    def register(function: Function) -> Function:
        def rule(program: ProgramView, node: Node) -> Node | None:
            return trace(program, node, function)

        rewrite(*ops, when=when, readers=readers, step=step)(rule)
        return function

    return register


def trace(program: ProgramView, node: Node, function: Callable[..., Any]) -> Node | None:
    """What a function makes of an op's arguments, tables of its own included.

    Several results take the places of the op's items.
    """

    def made(*args: Any, **kwargs: Any) -> Any:
        with fake_mode(program):
            return function(*args, **kwargs)

    results = insert_traced(program, node, made)
    if not isinstance(value(node), tuple | list):
        found: Node = results
        return found
    for item in list(node.users):
        item.replace_all_uses_with(results[item.args[1]])
        program.graph.erase_node(item)
    program.graph.erase_node(node)
    return None


def refuse(*ops: Any, when: Condition | None = None, reason: str) -> None:
    """Refuse these ops, or some calls of them, where torch.onnx would write something else.

    Args:
        reason: the end of a sentence that names op, module and line.
    """

    def refused(*_: Any, **__: Any) -> Any:
        raise ValueError(reason)

    if when is None:  # what torch.onnx makes of other ops may call it as well
        form(*ops)(refused)
    for op in ops:
        REFUSALS.setdefault(op, []).append((when or (lambda _: True), reason))


def refuse_calls(program: ExportedProgram) -> None:
    """
    Raises:
        LoweringError: the program has a call that `refuse` names.
    """
    refusals = {_registered(op): found for op, found in REFUSALS.items()}
    for node in all_nodes(program):
        for when, reason in refusals.get(node.target, ()):
            if when(node):
                raise LoweringError(
                    f"ONNX has no form for {call_place(node)}: {reason}", hint=ANOTHER_OP
                )


def rewrites(
    step: Step, reader: Reader | None = None
) -> tuple[dict[Any, Rewrite], dict[Any, Condition]]:
    """The rules of a step, and which calls they are for, as `apply_rules` takes them."""
    found: dict[Any, list[Rewriting]] = {}
    for op, some in REWRITES.items():
        fit = [one for one in some if one.step == step and (not reader or reader in one.readers)]
        if fit:
            found[op] = fit

    def first(program: ProgramView, node: Node) -> Node | None:
        return next(one.rule for one in found[node.target] if one.when(node))(program, node)

    def fits(node: Node) -> bool:
        return any(one.when(node) for one in found[node.target])

    return dict.fromkeys(found, first), dict.fromkeys(found, fits)


def translation_table(reader: Reader) -> dict[Any, Form]:
    """The table for `torch.onnx.export(custom_translation_table=...)`."""
    table = {_registered(op): function for op, function in FORMS[reader].items()}
    return {op: function for op, function in table.items() if op is not None}


def _registered(op: Any) -> Any:
    """An op that is named by a string, or None where nothing has registered it."""
    if not isinstance(op, str):
        return op
    namespace, name = op.split("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet and packet.default


def onnxruntime_on(device: str) -> Reader:
    """ONNX Runtime with the provider for a device, "cpu" or "cuda"."""
    return "onnxruntime-cpu" if device == "cpu" else "onnxruntime-cuda"
