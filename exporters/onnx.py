"""Lower a program to ONNX for ONNX Runtime: one graph file, one safetensors that it refers to as
external data.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass
from onnxscript.optimizer import optimize_ir
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Node

from enginecast.errors import LoweringError
from enginecast.exporters.assertions import drop_assertions
from enginecast.exporters.hoist_weights import hoist_weights
from enginecast.exporters.legalize import legalize
from enginecast.exporters.legalize_quantized import legalize_quantized
from enginecast.exporters.onnx_convert import convert, quiet
from enginecast.exporters.onnx_metadata import plain_metadata, without_lines
from enginecast.exporters.onnx_weights import fill_weights, store_weights
from enginecast.exporters.ort_pads import keep_pads_of_max_pools
from enginecast.exporters.readers import Reader
from enginecast.exporters.weights_file import check_dtypes
from enginecast.passes.graph_edit import (
    dtype_of,
    first_input,
    structural_copy,
    weight_specs,
)
from enginecast.passes.purity import is_mutating
from enginecast.runtime.manifest import ShapeRange

GRAPH_FILE = "engine.onnx"
WEIGHTS_FILE = "weights.safetensors"
OPSET = 23

_FP8 = frozenset({ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2})
_INTEGER_OPS = frozenset(
    {"MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QuantizeLinear", "DequantizeLinear"}
)
_SYMBOL = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Lowered:
    """What a lowering wrote."""

    files: tuple[str, ...]
    """Names in the folder; the graph first."""
    nodes: int
    ops: Mapping[str, int]
    """How often each op stands in the graph, as "domain::Op" outside ONNX's own domain."""
    opset: int
    """0: the engine is no ONNX graph."""
    domains: Mapping[str, int]
    minimum_runtime: str
    """Oldest ONNX Runtime that is known to run this graph right, as a requirement:
    "onnxruntime>=1.28".
    """
    quantized: Literal["", "fp8", "int8"] = ""
    """As in `EngineRecord`."""
    notes: tuple[str, ...] = ()
    """What of the program is not in the engine, as sentences."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """What machine code asks of the machine that runs it; see `runtime.fitness`."""
    profile: tuple[ShapeRange, ...] = ()
    """Of a TensorRT engine."""
    network: str | None = None
    """As in `EngineRecord`."""


@dataclass(frozen=True)
class OnnxModel:
    """A graph in memory, its weights promised."""

    model: ir.Model
    """Each node says where it comes from in its metadata: `MODULE` and `LINE`."""
    notes: tuple[str, ...]
    """As in `Lowered`."""


def lower_to_onnx(
    program: ExportedProgram,
    folder: Path,
    *,
    outputs: Sequence[str],
    symbols: Mapping[str, str],
    shapes: Sequence[Sequence[int | str]] = (),
    reader: Reader = "onnxruntime-cpu",
    gemm_float8: bool = False,
) -> Lowered:
    """Write `engine.onnx` and `weights.safetensors`; the arguments but `folder`, which exists, are
    those of `onnx_model`.

    Raises:
        LoweringError: as `onnx_model`.  No file is left then.
    """
    made = onnx_model(
        program,
        outputs=outputs,
        symbols=symbols,
        shapes=shapes,
        reader=reader,
        gemm_float8=gemm_float8,
    )
    return _describe(made.model, save_model(made.model, folder), made.notes)


def onnx_model(
    program: ExportedProgram,
    *,
    outputs: Sequence[str],
    symbols: Mapping[str, str],
    shapes: Sequence[Sequence[int | str]] = (),
    reader: Reader = "onnxruntime-cpu",
    gemm_float8: bool = False,
) -> OnnxModel:
    """The graph of a program, with nothing computed of its weights.

    Args:
        program: after the passes; left as it is.
        outputs: names for the outputs, in the program's order.
        symbols: torch's symbol names to the ones that users see: {"s43": "batch"}.
        shapes: of the outputs, in names that users see; empty: as torch.onnx writes them.
        reader: chooses between ops that differ in speed, and in rows that are masked whole, and
            how integers are multiplied; TensorRT gets ops of ONNX's own alone.
        gemm_float8: whether fp8 is multiplied by com.microsoft GemmFloat8: see
            `legalize_quantized`.

    Raises:
        LoweringError: an op has no ONNX form (names it with module and source line), forward keeps
            state, a weight is complex, names clash, or values are quantised in a way that the
            reader has no kernels for.
    """
    program = structural_copy(program)
    refuse_state(program)
    _refuse_names(program, outputs)
    notes = drop_assertions(program)
    legalize_quantized(program, reader=reader, opset=OPSET, gemm_float8=gemm_float8)
    legalize(program, reader=reader)
    weights = hoist_weights(program)
    check_dtypes(weights)
    model = convert(program, opset=OPSET, reader=reader)
    fill_weights(model, weights)
    with quiet():
        # Not ONNXProgram.optimize: its rotary fusion breaks on a batch (cos, sin are broadcast).
        optimize_ir(model)
    keep_pads_of_max_pools(model)
    _name_values(model, input_names(program), outputs, symbols)
    for value, dims in zip(model.graph.outputs, shapes, strict=False):
        value.shape = ir.Shape(dims)
    plain_metadata(model)
    return OnnxModel(model, notes)


def save_model(
    model: ir.Model, folder: Path, *, graph: str = GRAPH_FILE, weights: str = WEIGHTS_FILE
) -> tuple[str, ...]:
    """Write a graph and its weights, or neither.

    Args:
        model: afterwards it needs the file of weights.  Its lines of source are not written: they
            are for messages.
        folder: it exists.
        graph: name of the file.
        weights: name of the file that is left out where no weight is large.

    Returns:
        The names of the files that there are, the graph first.
    """
    try:
        stored = store_weights(model, folder / weights)
        with without_lines(model):
            ir.save(model, folder / graph)
    except BaseException:
        for name in (graph, weights):
            (folder / name).unlink(missing_ok=True)
        raise
    return (graph, *((weights,) if stored else ()))


def refuse_state(program: ExportedProgram) -> None:
    """An engine has no memory from one call to the next.

    Raises:
        LoweringError: forward writes into a weight or buffer.
    """
    specs = weight_specs(program)
    for node in program.graph.nodes:
        if not is_mutating(node):
            continue
        written = first_input(node)
        while _is_view(written):
            written = first_input(written)
        if written.name in specs:
            raise LoweringError(
                f"forward writes into {specs[written.name].target}, and an engine cannot keep it",
                hint="Return the new value instead, or export without the update.",
            )


def _is_view(node: Node) -> bool:
    """Whether a node's value may lie in the memory of its first input."""
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(found.alias_info for found in schema.returns)
    return aliases and dtype_of(node) == dtype_of(first_input(node))


def _refuse_names(program: ExportedProgram, outputs: Sequence[str]) -> None:
    """ONNX has one namespace for inputs and outputs."""
    inputs = program.graph_signature.user_inputs
    twice = [n for n in outputs if n in inputs or list(outputs).count(n) > 1]
    if twice:
        raise LoweringError(
            f"the output '{twice[0]}' has the name of an input or of another output",
            hint="Rename it in what forward returns.",
        )


def input_names(program: ExportedProgram) -> list[str]:
    return [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, ConstantArgument)
    ]


def _name_values(
    model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], symbols: Mapping[str, str]
) -> None:
    graph = model.graph
    # An input that is handed through has lost its name to the copy of it that is the output.
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = name
    values = [value for node in graph.all_nodes() for value in node.outputs]
    for value in (*values, *list(graph.initializers.values())):
        if value.name in outputs:
            value.name = f"{value.name}_inner"
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    NameFixPass()(model)
    for value in (*graph.inputs, *values):
        _rename_dims(value, symbols)


def _rename_dims(value: ir.Value, symbols: Mapping[str, str]) -> None:
    """Users know "batch", not "s43"; also within "2*s43"."""
    if value.shape is None:
        return
    dims: list[int | ir.SymbolicDim] = []
    for dim in value.shape:
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            renamed = _SYMBOL.sub(lambda name: symbols.get(name[0], name[0]), str(dim.value))
            dims.append(ir.SymbolicDim(renamed))
        else:
            dims.append(dim)
    value.shape = ir.Shape(dims)  # a new one: torch's exporter freezes some


def op_counts(model: ir.Model) -> Counter[str]:
    """How often each op stands in a graph, branches and loop bodies included."""
    nodes = model.graph.all_nodes()
    return Counter(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in nodes)


def _describe(model: ir.Model, files: tuple[str, ...], notes: tuple[str, ...]) -> Lowered:
    ops = op_counts(model)
    return Lowered(
        files,
        sum(ops.values()),
        dict(sorted(ops.items())),
        model.opset_imports[""],
        dict(sorted(model.opset_imports.items())),
        # 1.28: the first whose CUDA skip norm does not return zeros for large fp16 inputs
        # (microsoft/onnxruntime#29034); Attention and RMSNormalization of opset 23 are older,
        # and so are MatMulNBits of 8 bits on x86 (1.22, #24491) and QuantizeLinear by blocks.
        "onnxruntime>=1.28",
        _quantized(model),
        notes,
    )


def _quantized(model: ir.Model) -> Literal["", "fp8", "int8"]:
    """What the engine holds: fp8 values, or ops that multiply or scale integers."""
    nodes = list(model.graph.all_nodes())
    values = [value for node in nodes for value in (*node.inputs, *node.outputs)]
    if any(value is not None and value.dtype in _FP8 for value in values):
        return "fp8"
    return "int8" if any(node.op_type in _INTEGER_OPS for node in nodes) else ""
