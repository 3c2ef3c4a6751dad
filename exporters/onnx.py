"""Lower a program to ONNX for ONNX Runtime: one graph file, one safetensors that it refers to as
external data.
"""

import ast
import contextlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from onnxscript.optimizer import optimize_ir
from torch.export import ExportedProgram

from enginecast import __version__
from enginecast.errors import LoweringError
from enginecast.exporters.hoist_weights import HoistedWeight, hoist_weights
from enginecast.exporters.legalize import legalize
from enginecast.exporters.onnx_ops import translation_table
from enginecast.exporters.weights_file import Placed, write_weights
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.source import module_path, source_line

GRAPH_FILE = "engine.onnx"
WEIGHTS_FILE = "weights.safetensors"
OPSET = 23
INLINE = 1024
"""Bytes up to which a weight stays in the graph file, where ONNX tools fold and show it."""

_DTYPES = {
    torch.float64: ir.DataType.DOUBLE,
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}


@dataclass(frozen=True)
class Lowered:
    """What a lowering wrote."""

    files: tuple[str, ...]
    """Names in the folder; the graph first."""
    nodes: int
    ops: Mapping[str, int]
    """How often each op stands in the graph, as "domain::Op" outside ONNX's own domain."""
    opset: int
    domains: Mapping[str, int]
    minimum_runtime: str
    """Oldest ONNX Runtime that is known to run this graph right, as a requirement:
    "onnxruntime>=1.28".
    """


def lower_to_onnx(
    program: ExportedProgram,
    folder: Path,
    *,
    outputs: Sequence[str],
    symbols: Mapping[str, str],
    device: str = "cpu",
) -> Lowered:
    """Write `engine.onnx` and `weights.safetensors`.

    Args:
        program: after the passes; left as it is.
        folder: where the files go; it exists.
        outputs: names for the outputs, in the program's order.
        symbols: torch's symbol names to the ones that users see: {"s43": "batch"}.
        device: "cpu" or "cuda": chooses between ops that differ in speed only.

    Raises:
        LoweringError: an op has no ONNX form; names it with module and source line.
    """
    program = structural_copy(program)
    legalize(program)
    weights = hoist_weights(program)
    stored = [w for w in weights if w.size > INLINE]
    placed = write_weights(folder / WEIGHTS_FILE, stored) if stored else {}
    converted = _convert(program, device)
    model = converted.model
    _fill_weights(model, weights, placed, folder)
    # Not ONNXProgram.optimize: its rotary fusion breaks on a batch (cos and sin are broadcast).
    optimize_ir(model)
    _name_values(model, outputs, symbols)
    _plain_metadata(model)
    ir.save(model, folder / GRAPH_FILE)
    files = (GRAPH_FILE, *((WEIGHTS_FILE,) if stored else ()))
    return _describe(model, files)


def _convert(program: ExportedProgram, device: str) -> torch.onnx.ONNXProgram:
    try:
        with _quiet(), torch.no_grad():
            converted = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=translation_table(device=device),
                optimize=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise LoweringError(
            f"ONNX has no form for part of this program: {_why(error, program)}",
            hint="Replace the op in the model, or take it out with a pass.",
        ) from error
    assert converted is not None
    return converted


@contextlib.contextmanager
def _quiet():  # type: ignore[no-untyped-def]
    """torch.onnx prints progress, and warns of torchvision ops it cannot register; neither helps a
    user.
    """
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "torch.onnx._internal.exporter")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _why(error: BaseException, program: ExportedProgram) -> str:
    """The innermost cause, and the place in the user's code when it names a node."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    for node in program.graph.nodes:
        if node.op == "call_function" and str(node.target) in text:
            return f"{text} ({module_path(node)} {source_line(node)})"
    return text


def _fill_weights(
    model: ir.Model, weights: Sequence[HoistedWeight], placed: Mapping[str, Placed], folder: Path
) -> None:
    """Give every initializer its value: small ones inline, the others as a place in the weights
    file.
    """
    initializers = model.graph.initializers
    for weight in weights:
        found = initializers.pop(weight.placeholder, None)
        if found is None:
            raise LoweringError(f"torch.onnx lost the weight {weight.name}")
        found.name = weight.name
        found.const_value = _tensor(weight, placed.get(weight.name), folder)
        initializers[weight.name] = found


def _tensor(weight: HoistedWeight, place: Placed | None, folder: Path) -> ir.TensorProtocol:
    dtype = _DTYPES[weight.dtype]
    if place is None:
        value = weight.compute()
        raw = value.view(torch.uint8) if value.dtype == torch.bfloat16 else value
        return ir.Tensor(raw.numpy().view(dtype.numpy()), dtype=dtype, name=weight.name)
    return ir.ExternalTensor(
        WEIGHTS_FILE,
        place.offset,
        place.length,
        dtype,
        shape=ir.Shape(weight.shape),
        name=weight.name,
        base_dir=str(folder),
    )


def _name_values(model: ir.Model, outputs: Sequence[str], symbols: Mapping[str, str]) -> None:
    for value, name in zip(model.graph.outputs, outputs, strict=True):
        value.name = name
    for node in model.graph:
        for value in node.outputs:
            _rename_dims(value, symbols)
    for value in model.graph.inputs:
        _rename_dims(value, symbols)


def _rename_dims(value: ir.Value, symbols: Mapping[str, str]) -> None:
    if value.shape is None:
        return
    for index, dim in enumerate(value.shape):
        if isinstance(dim, ir.SymbolicDim) and str(dim.value) in symbols:
            value.shape[index] = ir.SymbolicDim(symbols[str(dim.value)])


def _plain_metadata(model: ir.Model) -> None:
    """Keep where a node comes from; drop stack traces, which hold paths of the machine that
    exported.
    """
    model.producer_name, model.producer_version = "enginecast", __version__
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        # The scopes of a node, as text: root, modules from the outside in, the node itself.
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        node.metadata_props.clear()
        if len(scopes) > 2 and scopes[-2]:
            node.metadata_props["enginecast.module"] = scopes[-2]
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def op_counts(model: ir.Model) -> Counter[str]:
    """How often each op stands in a graph."""
    return Counter(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in model.graph)


def _describe(model: ir.Model, files: tuple[str, ...]) -> Lowered:
    ops = op_counts(model)
    return Lowered(
        files,
        sum(ops.values()),
        dict(sorted(ops.items())),
        model.opset_imports[""],
        dict(sorted(model.opset_imports.items())),
        # 1.28: the first whose CUDA skip norm does not return zeros for large fp16 inputs
        # (microsoft/onnxruntime#29034); Attention and RMSNormalization of opset 23 are older.
        "onnxruntime>=1.28",
    )
