"""Print a program as stable text, one node per line, and diff two such texts.

    %p_wo_weight: f32[32, 64] = parameter "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    %x: f32[s0, 64] = input "x"
    %linear: f32[s0, 32] = aten.linear.default(%x, %p_wo_weight)  # modeling_t5.py:123
    return %linear

Symbolic sizes are numbered in the order in which they appear, because torch names them by hashes.
"""

import difflib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

from enginecast.passes.ir.deferred_weights import deferred_weights
from enginecast.passes.ir.source import source_line

_DTYPES: dict[torch.dtype | None, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b1",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

DTYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""The compute dtypes by their names in options and precisions."""

_INPUT_WORDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.CUSTOM_OBJ: "object",
    InputKind.TOKEN: "token",
    InputKind.USER_INPUT: "input",
}


def print_ir(program: ExportedProgram) -> str:
    """The text of a program, ending in a line break; the same from run to run."""
    signature = program.graph_signature
    inputs = {
        spec.arg.name: f'{_INPUT_WORDS[spec.kind]} "{spec.target or spec.arg.name}"'
        for spec in signature.input_specs
    }
    deferred = deferred_weights(program)
    inputs |= {
        spec.arg.name: f'deferred "{deferred[spec.target].name}"'
        for spec in signature.input_specs
        if spec.target in deferred
    }
    returns = [
        "" if spec.kind is OutputKind.USER_OUTPUT else f" -> {spec.kind.name.lower()}"
        for spec in signature.output_specs
    ]
    return "\n".join(_Printer().graph(program.graph, inputs, returns)) + "\n"


def diff_ir(before: str, after: str) -> str:
    """A unified diff of two texts; "" if they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "before", "after", n=1, lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)


class _Printer:
    """Prints one program; remembers how its symbols are numbered."""

    def __init__(self) -> None:
        self._symbols: dict[Any, Any] = {}

    def graph(self, graph: Graph, inputs: dict[str, str], returns: list[str]) -> list[str]:
        lines = []
        for node in graph.nodes:
            lines.append(self._line(node, inputs, returns))
            if node.op == "get_attr":
                # The subgraph of a control-flow op, indented under the node that names it.
                owner: Any = node.graph.owning_module
                inner = getattr(owner, str(node.target), None)
                if isinstance(inner, GraphModule):
                    lines += [f"    {line}" for line in self.graph(inner.graph, {}, [])]
        return lines

    def _line(self, node: Node, inputs: dict[str, str], returns: list[str]) -> str:
        if node.op == "output":
            results: Any = node.args[0]
            results = results if isinstance(results, list | tuple) else (results,)
            pairs = zip(results, returns or [""] * len(results), strict=True)
            return "return " + ", ".join(self._value(result) + note for result, note in pairs)
        kind = self._type(node.meta.get("val"))
        head = f"%{node.name}: {kind}" if kind else f"%{node.name}"
        if node.op == "placeholder":
            return f"{head} = {inputs.get(node.name, 'input')}"
        if node.op == "get_attr":
            return f'{head} = attribute "{node.target}"'
        arguments = [self._value(argument) for argument in node.args]
        arguments += [f"{key}={self._value(value)}" for key, value in node.kwargs.items()]
        source = source_line(node)
        comment = f"  # {source}" if source else ""
        return f"{head} = {_target(node.target)}({', '.join(arguments)}){comment}"

    def _type(self, value: object) -> str:
        if isinstance(value, Tensor):
            return f"{dtype_text(value.dtype)}[{', '.join(map(self._size, value.shape))}]"
        if isinstance(value, SymInt | SymFloat | SymBool):
            return "sym"
        if isinstance(value, list | tuple):
            return f"({', '.join(self._type(item) for item in value)})"
        return "" if value is None else type(value).__name__

    def _size(self, size: int | SymInt) -> str:
        if isinstance(size, int):
            return str(size)
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            # A letter for the kind ("s" backed, "u" known only when run), then our own number.
            name = f"{str(symbol)[0]}{len(self._symbols)}"
            self._symbols.setdefault(symbol, symbol.func(name, integer=True, positive=True))
        return str(expression.xreplace(self._symbols))

    def _value(self, value: object) -> str:
        if isinstance(value, Node):
            return f"%{value.name}"
        if isinstance(value, torch.dtype):
            return dtype_text(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, SymInt):
            return self._size(value)
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return str(value).removeprefix("torch.")
        return repr(value)


def dtype_text(dtype: torch.dtype | None) -> str:
    """float16 -> f16, int64 -> i64, bool -> b1; None (no tensor) -> None."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.").replace("float", "f")


def _target(target: Callable[..., Any] | str) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if isinstance(target, str):
        return target
    if getattr(operator, target.__name__, None) is target:
        return f"operator.{target.__name__}"
    return f"{target.__module__}.{target.__name__}"
