"""Networks of one operator each, of `networks.txt`, in every element type that ONNX allows."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import onnx.parser
from onnx import TensorProto, helper

from enginecast.exporters.tensorrt.gate.operators import (
    NOT_ASKED,
    OPSET,
    TYPES,
    label_of,
    schema_of,
    type_variables,
)

FILE = Path(__file__).with_name("networks.txt")
CODES = {name: int(dtype) for dtype, name in TYPES.items()}
ASKED = tuple(name for name in CODES if name not in NOT_ASKED)
TYPED = ("to", "dtype", "output_datatype", "output_dtype")
"""Attributes that say the type of an output."""
OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional
Signature = tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """A network without its element types."""

    op: str
    label: str
    """What it asks besides types, as the table says it: "rank 3", "mode=cubic"."""
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    text: str = ""
    """Of onnx.parser; empty: made of the rest."""


def forms() -> dict[str, list[Form]]:
    """The networks of each operator; the first has no label."""
    found: dict[str, list[Form]] = {}
    ops: list[str] = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        head, *rest = (part.strip() for part in line.split("|"))
        if not line.startswith(" "):
            ops = head.split()
            for op in ops:
                found.setdefault(op, [_base(op, rest)])
            continue
        for op in ops:
            found[op] += _others(found[op][0], head, rest)
    return found


def _base(op: str, rest: Sequence[str]) -> Form:
    if rest and "=>" in rest[0]:
        return Form(op, "", (), {}, text=rest[0])
    inputs, attributes = (*rest, "")[:2]
    return Form(op, "", tuple(inputs.split()), _attributes(attributes))


def _others(base: Form, head: str, rest: Sequence[str]) -> Iterator[Form]:
    """The networks of an indented line."""
    inputs = tuple(rest[0].split()) if rest else base.inputs
    given = {**base.attributes, **_attributes(rest[1])} if rest[1:] else base.attributes
    form = replace(base, inputs=inputs, attributes=given)
    name, is_attribute, values = head.partition(" = ")
    if "&" in head:
        yield replace(form, label=head)
    elif is_attribute:
        for value in values.split():
            read = json.loads(value)
            yield replace(form, label=label_of(name, read), attributes={**given, name: read})
    elif head == "rank":
        yield replace(form, label=f"rank {_shape(inputs[0]).count(',') + 1}")
    else:
        yield replace(form, label=head)


def _attributes(text: str) -> dict[str, Any]:
    pairs = re.findall(r"(\w+) = (\S+?)(?:,\s|$)", text)
    return {name: value if value == "T" else json.loads(value) for name, value in pairs}


def _shape(word: str) -> str:
    return word.strip("=[]")


def signatures(op: str) -> list[Signature]:
    """Every choice of types that ONNX allows an operator."""
    return list(product(*(_asked(names) for names in type_variables(op).values())))


def _asked(names: Sequence[str]) -> list[str]:
    return [name for name in ASKED if name in names]


def first_signature(op: str) -> Signature:
    """That of an ordinary network: floats, and int64 where indices are meant."""
    return tuple(
        next(name for name in ("FP32", "INT64", "BOOL", "INT8", *ASKED) if name in names)
        for names in map(_asked, type_variables(op).values())
    )


@dataclass(frozen=True)
class Network:
    """A model, and what its builder has to be told."""

    model: onnx.ModelProto
    values: Mapping[str, Sequence[int]]
    """Of inputs that were constants."""


def network(
    form: Form,
    types: Signature,
    *,
    computed: int | None = None,
    dynamic: bool = False,
    outputs: int | None = None,
) -> Network:
    """The network of a form.

    Args:
        types: of each type variable.
        computed: an input that is a constant in the form, and is one of the network here.
        dynamic: the first size of its inputs varies.
        outputs: how many are used; None: those that an operator always has.
    """
    if form.text:
        return Network(_parsed(form, types), {})
    schema = schema_of(form.op)
    bound = dict(zip(type_variables(form.op), types, strict=True))
    made = _Maker()
    names = []
    varies = _shape(form.inputs[0]).split(",")[0] if dynamic else None
    for index, word in enumerate(form.inputs):
        parameter = schema.inputs[min(index, len(schema.inputs) - 1)]
        code = _code(form.op, parameter.type_str, bound)
        names.append(made.value(word, code, index == computed, varies))
    attributes = dict(form.attributes)
    for name, value in attributes.items():
        if value == "T":
            code = CODES[types[0]]
            attributes[name] = helper.make_tensor("value", code, [1], [1])
    always = [one for one in schema.outputs if one.option is not OPTIONAL]
    outs = schema.outputs[: outputs or max(len(always), 1)]
    for name in TYPED:
        if name in schema.attributes and outs[0].type_str in bound:
            attributes.setdefault(name, CODES[bound[outs[0].type_str]])
    many = 2 if form.op == "Split" else len(outs)
    results = [f"y{i}" for i in range(many)]
    node = helper.make_node(form.op, names, results, name="asked", **attributes)
    made.nodes.append(node)
    codes = [_code(form.op, outs[min(i, len(outs) - 1)].type_str, bound) for i in range(many)]
    for name, code in zip(results, codes, strict=True):
        made.output(name, code)
    return made.network(form.op)


def _code(op: str, type_str: str, bound: Mapping[str, str]) -> int:
    """The element type of an input or output; of a variable with one choice, that one."""
    if type_str in bound:
        return CODES[bound[type_str]]
    for one in schema_of(op).type_constraints:
        if one.type_param_str == type_str:
            type_str = one.allowed_type_strs[0]
    return int(TensorProto.DataType.Value(type_str.removeprefix("tensor(")[:-1].upper()))


def _parsed(form: Form, types: Signature) -> onnx.ModelProto:
    name = str(TensorProto.DataType.Name(CODES[types[0]])).lower()
    head = f'<ir_version: 11, opset_import: ["" : {OPSET}]> asked '
    parsed: onnx.ModelProto = onnx.parser.parse_model(
        head + re.sub(r"\bT\[", f"{name}[", form.text)
    )
    return parsed


class _Maker:
    """Collects the parts of a graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.values: dict[str, Sequence[int]] = {}

    def value(self, word: str, code: int, computed: bool, varies: str | None) -> str:
        """The name of an input of the node.

        Args:
            varies: a first size that is not known.
        """
        name = f"x{len(self.inputs) + len(self.constants)}"
        if word == ".":
            return ""
        if not word.startswith("="):
            first, *rest = _shape(word).split(",")
            sizes = ["n" if first == varies else int(first), *map(int, rest)]
            return self.given(name, code, sizes)
        dims, numbers = _constant(word)
        if computed:
            self.values[name] = [int(number) for number in numbers]
            return self.given(name, code, dims)
        self.constants.append(helper.make_tensor(name, code, dims, numbers))
        return name

    def given(self, name: str, code: int, dims: Sequence[int | str]) -> str:
        """An input of the network; fp8 is quantized in it."""
        fp8 = code == TensorProto.FLOAT8E4M3FN
        self.inputs.append(
            helper.make_tensor_value_info(name, TensorProto.FLOAT if fp8 else code, dims)
        )
        if not fp8:
            return name
        self._scale("QuantizeLinear", name, f"{name}q", output_dtype=code)
        return f"{name}q"

    def output(self, name: str, code: int) -> None:
        """A result; fp8 is dequantized."""
        if code == TensorProto.FLOAT8E4M3FN:
            self._scale("DequantizeLinear", name, f"{name}d")
            name, code = f"{name}d", TensorProto.FLOAT
        self.outputs.append(helper.make_tensor_value_info(name, code, None))

    def _scale(self, op: str, source: str, result: str, **attributes: Any) -> None:
        scale = f"{result}s"
        self.constants.append(helper.make_tensor(scale, TensorProto.FLOAT, [], [1.0]))
        self.nodes.append(helper.make_node(op, [source, scale], [result], **attributes))

    def network(self, op: str) -> Network:
        opset = max(OPSET, schema_of(op).since_version)
        graph = helper.make_graph(
            self.nodes, "asked", self.inputs, self.outputs, initializer=self.constants
        )
        imports = [helper.make_opsetid("", opset)]
        return Network(helper.make_model(graph, opset_imports=imports, ir_version=11), self.values)


def _constant(word: str) -> tuple[list[int], list[float]]:
    """Shape and numbers of a constant."""
    if word.startswith("=["):
        dims = [int(size) for size in _shape(word).split(",")]
        count = 1
        for size in dims:
            count *= size
        return dims, [1] * count
    if word.startswith("={"):
        numbers = [float(number) for number in word[2:-1].split(",") if number]
        return [len(numbers)], numbers
    return [], [float(word[1:])]
