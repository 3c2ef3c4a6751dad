"""A twin of an engine file that no provider here can run: the very file, computed in fp32.

    init w: bf16          init w.stored: bf16;  w: f32 = Cast(w.stored, to=FLOAT)
    y: bf16 = MatMul      y: f32 = MatMul
    Cast(to=BFLOAT16)     Cast(to=FLOAT)

    init w: e2m1          init w.stored: u8;  w: e4m3 = Cast(Gather(two values of a byte, w.stored))
    trt::TRT_MXFP8Dequ... DequantizeLinear(w, Gather(powers of two, exponents))

Nothing else is changed, so whatever is wrong in the file is wrong in the twin, and ONNX Runtime's
CPU provider has kernels for it.  The weights are those in the engine's own file of weights.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, numpy_helper

from enginecast.errors import VerificationError
from enginecast.runtime.sessions.onnxruntime import CPU_PROVIDER, OrtSession, create_session

MX = "TRT_MXFP8DequantizeLinear"
"""An operator of TensorRT's parser."""
_LOW = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
_DTYPES = frozenset({"to", "dtype", "output_dtype", "precision", "softmax_precision", "stash_type"})
"""Attributes that hold the number of a dtype."""


def open_twin(path: Path, threads: int | None = None) -> OrtSession:
    """Check an engine file against ONNX's rules, and open its twin.

    Raises:
        VerificationError: the file breaks the rules of ONNX.
        MissingError: the CPU provider lacks a kernel.
        BundleError: ONNX Runtime refuses the twin.
    """
    model = onnx.load(path, load_external_data=False)
    try:
        onnx.checker.check_model(str(path))
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        said = " ".join(str(error).split())
        raise VerificationError(f"{path.name} is not valid ONNX: {said}") from error
    widen(model)
    options = onnxruntime.SessionOptions()
    # Node by node, as written: an optimizer would also hold every weight in fp32.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    # Beside the weights, whose paths are relative.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".twin-", suffix=".onnx") as file:
        file.write(model.SerializeToString())
        file.flush()
        session = create_session(Path(file.name), (CPU_PROVIDER,), threads, options)
    return OrtSession(session, CPU_PROVIDER, path.name)


def widen(model: onnx.ModelProto) -> None:
    """Make every fp16 and bf16 value of a model fp32, in place."""
    _widen_graph(model.graph)
    for function in model.functions:
        _widen_types(value.type for value in function.value_info)
        for attribute in [*function.attribute_proto, *_attributes(function.node)]:
            _widen_attribute(attribute)


def _widen_graph(graph: GraphProto) -> None:
    _widen_types(v.type for v in (*graph.input, *graph.output, *graph.value_info))
    casts = []
    for tensor in list(graph.initializer):
        if tensor.data_type == TensorProto.FLOAT4E2M1:
            casts += _unpacked(graph, tensor)
        if tensor.data_type not in _LOW:
            continue
        if tensor.data_location != TensorProto.EXTERNAL:
            _widen_tensor(tensor)
            continue
        name = tensor.name
        tensor.name = f"{name}.stored"
        casts.append(onnx.helper.make_node("Cast", [tensor.name], [name], to=TensorProto.FLOAT))
    for attribute in _attributes(graph.node):
        _widen_attribute(attribute)
    plain = (_plain_mx(graph, node) if node.op_type == MX else [node] for node in graph.node)
    nodes = [*casts, *chain.from_iterable(plain)]
    del graph.node[:]
    graph.node.extend(nodes)


def _unpacked(graph: GraphProto, tensor: TensorProto) -> list[NodeProto]:
    """Nodes that give E2M1 values as e4m3, of the bytes that hold two of them each, the earlier one
    in the low half.
    """
    name, dims = tensor.name, list(tensor.dims)
    bytes_ = np.arange(256, dtype=np.uint8)
    halves = np.stack([bytes_ & 15, bytes_ >> 4], -1).view(ir.DataType.FLOAT4E2M1.numpy())
    tensor.name, tensor.data_type = f"{name}.stored", TensorProto.UINT8
    tensor.ClearField("dims")
    tensor.dims.append(-(-math.prod(dims) // 2))
    given = {f"{name}.table": halves.astype(np.float32), f"{name}.sizes": np.array(dims, np.int64)}
    graph.initializer.extend(numpy_helper.from_array(array, key) for key, array in given.items())
    make = onnx.helper.make_node
    return [
        make("Cast", [tensor.name], [f"{name}.index"], to=TensorProto.INT64),
        make("Gather", [f"{name}.table", f"{name}.index"], [f"{name}.pairs"]),
        make("Reshape", [f"{name}.pairs", f"{name}.sizes"], [f"{name}.values"]),
        make("Cast", [f"{name}.values"], [name], to=TensorProto.FLOAT8E4M3FN),
    ]


def _plain_mx(graph: GraphProto, node: NodeProto) -> list[NodeProto]:
    """Of ONNX's own ops."""
    [values, exponents], [result] = node.input, node.output
    powers = np.arange(256, dtype=np.uint8).view(ir.DataType.FLOAT8E8M0.numpy())
    table = numpy_helper.from_array(powers.astype(np.float32), f"{result}.powers")
    graph.initializer.append(table)
    how = {found.name: found.i for found in node.attribute}
    make = onnx.helper.make_node
    return [
        make("Cast", [exponents], [f"{result}.index"], to=TensorProto.INT64),
        make("Gather", [table.name, f"{result}.index"], [f"{result}.scale"]),
        make(
            "DequantizeLinear",
            [values, f"{result}.scale"],
            [result],
            axis=how["axis"],
            block_size=how["block_size"],
        ),
    ]


def _attributes(nodes: Iterable[NodeProto]) -> Iterator[AttributeProto]:
    return (attribute for node in nodes for attribute in node.attribute)


def _widen_attribute(attribute: AttributeProto) -> None:
    if attribute.name in _DTYPES and attribute.i in _LOW:
        attribute.i = TensorProto.FLOAT
    for tensor in (attribute.t, *attribute.tensors):
        if tensor.data_type in _LOW:
            _widen_tensor(tensor)
    for graph in (attribute.g, *attribute.graphs):
        if graph.node:
            _widen_graph(graph)


def _widen_tensor(tensor: TensorProto) -> None:
    array = numpy_helper.to_array(tensor).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _widen_types(types: Iterable[TypeProto]) -> None:
    for kind in types:
        if kind.HasField("sequence_type"):
            _widen_types([kind.sequence_type.elem_type])
        elif kind.HasField("tensor_type") and kind.tensor_type.elem_type in _LOW:
            kind.tensor_type.elem_type = TensorProto.FLOAT
        elif kind.tensor_type.elem_type == TensorProto.FLOAT4E2M1:
            kind.tensor_type.elem_type = TensorProto.FLOAT8E4M3FN
