"""Lower a program to ONNX for ONNX Runtime: one graph file, one safetensors that it refers to as
external data.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass
from torch.export import ExportedProgram

from enginecast.errors import LoweringError
from enginecast.exporters.files import all_or_none
from enginecast.exporters.onnx.convert import convert, quiet
from enginecast.exporters.onnx.metadata import MODULE, plain_metadata, without_lines
from enginecast.exporters.onnx.ops.registry import Reader
from enginecast.exporters.onnx.simplify import simplify
from enginecast.exporters.onnx.weights import fill_weights, narrow_weights, store_weights
from enginecast.exporters.onnx.workarounds import work_around
from enginecast.exporters.target import Artifact, LoweringRequest
from enginecast.exporters.weights.file import WEIGHTS_FILE, check_dtypes
from enginecast.passes.ir.deferred_weights import deferred_weights
from enginecast.passes.ir.edit import input_names
from enginecast.runtime.sessions.integer_sums import ANY_CPU, EXACT, LARGEST, MULTIPLY, SUMS

GRAPH_FILE = "engine.onnx"
OPSET = 23

_FOR_CPUS: Mapping[Reader, str] = {
    "onnxruntime-cpu": "transpose-images,stagger-rows,",
    "openvino": "stagger-rows,",
}
"""Passes that only make kernels of a CPU faster."""
_AFTERWARDS: Mapping[Reader, str] = {"onnxruntime-cpu": "append-cache,"}
"""Such passes that want what legalize-onnx made of masks."""
_FP8 = frozenset({ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2})
_INTEGER_OPS = frozenset(
    {
        "QLinearConv",
        *MULTIPLY,
        "MatMulNBits",
        "QuantizeLinear",
        "DequantizeLinear",
    }
)
_SYMBOL = re.compile(r"[A-Za-z_]\w*")


def lower_to_onnx(request: LoweringRequest, reader: Reader = "onnxruntime-cpu") -> Artifact:
    """Write `engine.onnx` and `weights.safetensors`.

    Raises:
        LoweringError: as `onnx_model`.  No file is left then.
    """
    model = onnx_model(request, reader)
    return describe(model, save_model(model, request.folder))


def lowering(reader: Reader, *, gemm_float8: bool = False) -> str:
    """The passes that bring a program into the form that `lower_to_onnx` translates, as a spec.

    Args:
        reader: chooses between ops that differ in speed, and in rows that are masked whole, and
            how integers are multiplied; TensorRT and OpenVINO get ops of ONNX's own alone.
        gemm_float8: whether fp8 is multiplied by com.microsoft GemmFloat8.
    """
    tables = "dequantize-tables," if reader == "tensorrt" else ""
    gemm = " gemm_float8=true" if gemm_float8 else ""
    return (
        f"drop-assertions,{tables}legalize-quantized{{reader={reader}{gemm}}},"
        f"legalize-fourier,{_FOR_CPUS.get(reader, '')}legalize-onnx{{reader={reader}}},"
        f"{_AFTERWARDS.get(reader, '')}"
        "lift-weights,merge-equal,separate-block-memory,hoist-weights"
    )


def onnx_model(request: LoweringRequest, reader: Reader) -> ir.Model:
    """The graph of a program, with nothing computed of its weights.

    Every node says where it comes from in its metadata: `MODULE` and `LINE`.

    Args:
        request: where it says nothing of the outputs' shapes, they are as torch.onnx writes them.
        reader: see `lowering`.

    Raises:
        LoweringError: an op has no ONNX form (names it with module and source line), a weight is
            complex, or names clash.
    """
    program, outputs = request.program, request.outputs
    _refuse_names(program, outputs)
    weights = deferred_weights(program)
    check_dtypes(weights.values())
    model = convert(program, opset=OPSET, reader=reader)
    fill_weights(model, weights)
    with quiet():
        simplify(model)
    narrow_weights(model)
    work_around(model)
    _name_values(model, input_names(program), outputs, request.symbols)
    shapes = {spec.name: spec.shape for spec in request.inputs}
    for value in model.graph.inputs:
        value.shape = ir.Shape(shapes[value.name]) if value.name in shapes else value.shape
    for value, dims in zip(model.graph.outputs, request.shapes, strict=False):
        value.shape = ir.Shape(dims)
    plain_metadata(model)
    return model


def save_model(
    model: ir.Model, folder: Path, *, graph: str = GRAPH_FILE, weights: str = WEIGHTS_FILE
) -> tuple[str, ...]:
    """Write a graph and its weights, or neither.

    Args:
        model: afterwards it needs the file of weights.  Its lines of source are not written: they
            are for messages.
        weights: name of the file that is left out where no weight is large.

    Returns:
        The names of the files that there are, the graph first.
    """
    with all_or_none(folder, (graph, weights)):
        stored = store_weights(model, folder / weights)
        with without_lines(model):
            ir.save(model, folder / graph)
    return (graph, *((weights,) if stored else ()))


def _refuse_names(program: ExportedProgram, outputs: Sequence[str]) -> None:
    """ONNX has one namespace for inputs and outputs."""
    inputs = program.graph_signature.user_inputs
    twice = [n for n in outputs if n in inputs or list(outputs).count(n) > 1]
    if twice:
        raise LoweringError(
            f"the output '{twice[0]}' has the name of an input or of another output",
            hint="Rename it in what forward returns.",
        )


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
    known = {name: f"({size})" if "/" in size else size for name, size in symbols.items()}
    dims: list[int | ir.SymbolicDim] = []
    for dim in value.shape:
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            renamed = _SYMBOL.sub(lambda name: known.get(name[0], name[0]), str(dim.value))
            dims.append(ir.SymbolicDim(renamed))
        else:
            dims.append(dim)
    value.shape = ir.Shape(dims)  # a new one: torch's exporter freezes some


def op_counts(model: ir.Model) -> Counter[str]:
    """How often each op stands in a graph, branches and loop bodies included."""
    nodes = model.graph.all_nodes()
    return Counter(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in nodes)


def describe(model: ir.Model, files: tuple[str, ...]) -> Artifact:
    """What is known of a model that was saved."""
    return Artifact(
        files,
        dict(sorted(op_counts(model).items())),
        # 1.28: the first whose CUDA skip norm does not return zeros for large fp16 inputs
        # (microsoft/onnxruntime#29034); Attention and RMSNormalization of opset 23 are older,
        # and so are MatMulNBits of 8 bits on x86 (1.22, #24491) and QuantizeLinear by blocks.
        "onnxruntime>=1.28",
        opset=model.opset_imports[""],
        domains=dict(sorted(model.opset_imports.items())),
        quantized=_quantized(model),
        requires=_sums(model),
        modules={
            node.name: node.metadata_props.get(MODULE, "")
            for node in model.graph.all_nodes()
            if node.name
        },
    )


def _quantized(model: ir.Model) -> Literal["", "fp8", "int8"]:
    """What the engine holds: fp8 values, or ops that multiply or scale integers."""
    nodes = list(model.graph.all_nodes())
    values = [value for node in nodes for value in (*node.inputs, *node.outputs)]
    if any(value is not None and value.dtype in _FP8 for value in values):
        return "fp8"
    return "int8" if any(node.op_type in _INTEGER_OPS for node in nodes) else ""


def _sums(model: ir.Model) -> dict[str, str]:
    """Whether every CPU has the sums of the engine's integer products: `integer_sums`."""
    products = [node for node in model.graph.all_nodes() if node.op_type in MULTIPLY]
    if not products and _quantized(model) == "int8":
        return {SUMS: ANY_CPU}
    needs = {
        ANY_CPU if _fits(node.inputs[place], node.op_type) else EXACT
        for node in products
        if not _is_signed(node)
        for place in MULTIPLY[node.op_type]
    }
    return {SUMS: max(needs)} if needs else {}


def _is_signed(node: ir.Node) -> bool:
    """Whether what is multiplied with the weight is signed, as on CUDA: such sums are exact."""
    read = node.inputs[0]
    return read is not None and read.dtype == ir.DataType.INT8


def _fits(weight: ir.Value | None, operator: str) -> bool:
    """Whether a weight is known, and two products that are added in 16 bits fit into them: those
    of neighbors along K, [..., K, N]; of a convolution, any two.
    """
    known = None if weight is None else weight.const_value
    if known is None:
        return False
    values = known.numpy().astype(np.int16)
    if operator == "QLinearConv":
        return bool(2 * np.abs(values).max() <= LARGEST)
    odd = values.shape[-2] % 2
    values = np.pad(values, [*[(0, 0)] * (values.ndim - 2), (0, odd), (0, 0)])
    pairs = values[..., ::2, :], values[..., 1::2, :]
    sums = (sum(np.maximum(sign * side, 0) for side in pairs) for sign in (1, -1))
    return all(bool(np.max(found) <= LARGEST) for found in sums)
