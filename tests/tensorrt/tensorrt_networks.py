"""TensorRT's form of ONNX, made of programs and run in ONNX Runtime: shared by its tests.

ONNX Runtime's CPU provider has no kernels for bf16.  A bf16 graph is run as the same graph in fp32,
which proves its structure and its weights, and not how TensorRT rounds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import numpy_helper
from programs import rewritten
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.exporters.onnx.lower import save_model
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt.gate.operators import MX
from enginecast.exporters.tensorrt.lower import (
    NETWORK_FILE,
    NETWORK_WEIGHTS_FILE,
    lowering,
    tensorrt_onnx,
)

BFLOAT16, FLOAT = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
FP8 = onnx.TensorProto.FLOAT8E4M3FN
QUANTIZED = {FP8, onnx.TensorProto.INT8, onnx.TensorProto.INT4, onnx.TensorProto.FLOAT4E2M1}


def order_of(
    program: ExportedProgram,
    folder: Path,
    outputs: Sequence[str] = ("out",),
    symbols: Mapping[str, str] | None = None,
) -> LoweringRequest:
    ready, _ = rewritten(program, lowering("onnx"))
    return LoweringRequest(
        ready, folder, outputs=outputs, symbols=symbols or {}, shapes=(), device="cuda"
    )


def save_network(model: ir.Model, folder: Path) -> tuple[str, ...]:
    """Write a graph and its weights as the exporter does."""
    return save_model(model, folder, graph=NETWORK_FILE, weights=NETWORK_WEIGHTS_FILE)


def network_of(
    program: ExportedProgram,
    folder: Path,
    outputs: Sequence[str] = ("out",),
    symbols: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """The checked network that lies in the folder, which may be new, with its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_network(tensorrt_onnx(order_of(program, folder, outputs, symbols)), folder)
    onnx.checker.check_model(folder / NETWORK_FILE, full_check=True)
    network = onnx.load(folder / NETWORK_FILE)
    require_form(network)
    return network


def require_form(network: onnx.ModelProto) -> None:
    """What holds of every network, whatever is in it."""
    opsets = {found.domain: found.version for found in network.opset_import}
    assert opsets in ({"": 23}, {"": 23, MX[0]: 1})
    types = value_types(network)
    for node in nodes_in(network.graph):
        assert node.domain == "" or (node.domain, node.op_type) == MX
        kinds = {types[name] for name in node.input if name in types}
        if node.op_type in ("Attention", "RMSNormalization", "LayerNormalization", "Pow", "Add"):
            assert len(kinds) == 1, f"{node.op_type} {node.name} mixes dtypes: {kinds}"
        if node.op_type == "Cast":
            assert onnx.helper.get_node_attr_value(node, "to") not in (FP8, onnx.TensorProto.DOUBLE)
        if node.op_type == "Gather":
            assert types.get(node.input[0]) not in (FP8, onnx.TensorProto.UINT8)
    require_scales(network)


def require_scales(network: onnx.ModelProto) -> None:
    """Static, positive, in the dtype of the values; symmetric."""
    types, made = value_types(network), {i.name: i for i in network.graph.initializer}
    made |= {n.output[0]: n.attribute[0].t for n in network.graph.node if n.op_type == "Constant"}
    for node in nodes_in(network.graph):
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        quantized, wide = node.input[0], node.output[0]
        if node.op_type == "QuantizeLinear":
            quantized, wide = wide, quantized
        assert types[quantized] in QUANTIZED
        if node.input[1] not in made:  # what scales the scales is looked at where it is read
            [inner] = [n for n in network.graph.node if n.output[0] == node.input[1]]
            assert inner.op_type == "DequantizeLinear"
            assert types[quantized] == onnx.TensorProto.FLOAT4E2M1
            assert inner.input[0] in made
            continue
        scale = numpy_helper.to_array(made[node.input[1]]).astype(np.float32)
        assert (scale > 0).all()
        assert np.isfinite(scale).all()
        for name in node.input[2:]:
            assert not numpy_helper.to_array(made[name]).any()
        assert types[wide] == made[node.input[1]].data_type


def value_types(network: onnx.ModelProto) -> dict[str, int]:
    graph = onnx.shape_inference.infer_shapes(network, strict_mode=True).graph
    declared = (*graph.input, *graph.output, *graph.value_info)
    found = {value.name: value.type.tensor_type.elem_type for value in declared}
    return found | {weight.name: weight.data_type for weight in graph.initializer}


def nodes_in(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """All nodes, those of branches and loops included."""
    found = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += nodes_in(attribute.g)
    return found


def op_count(network: onnx.ModelProto, *ops: str) -> int:
    return sum(node.op_type in ops for node in nodes_in(network.graph))


def run_network(network: onnx.ModelProto, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs of a network on ONNX Runtime's CPU provider, a bf16 one in fp32."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # Node by node, as written: ONNX Runtime's optimizers make integer products of fp8 ones, and
    # round biases to integers.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        widened(network).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
    given = [x.float() if x.dtype == torch.bfloat16 else x for x in inputs]
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), given, strict=True)}
    return tuple(torch.from_numpy(np.asarray(found)) for found in session.run(None, feeds))


def widened(network: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose bf16 values are fp32 ones."""
    copy = onnx.ModelProto()
    copy.CopyFrom(network)
    _widen(copy.graph)
    return copy


def _widen(graph: onnx.GraphProto) -> None:
    for weight in graph.initializer:
        _widen_tensor(weight)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == BFLOAT16:
            value.type.tensor_type.elem_type = FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _widen(attribute.g)
            elif attribute.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.name in ("to", "output_dtype") and attribute.i == BFLOAT16:
                attribute.i = FLOAT


def _widen_tensor(tensor: Any) -> None:
    if tensor.data_type == BFLOAT16:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
