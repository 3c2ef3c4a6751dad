"""TensorRT's form of ONNX, made of programs and run in ONNX Runtime: shared by its tests.

They run as the same graph in fp32, which proves their structure and their weights, and not how
TensorRT rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from programs import rewritten
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.errors import MissingError
from enginecast.exporters.onnx.fp32_twin import widen
from enginecast.exporters.onnx.lower import save_model
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt.build import Job, build_plan
from enginecast.exporters.tensorrt.gate.operators import MX
from enginecast.exporters.tensorrt.lower import (
    NETWORK_FILE,
    NETWORK_WEIGHTS_FILE,
    lowering,
    parsed,
    tensorrt_onnx,
)
from enginecast.exporters.tensorrt.options import TensorRTRTXOptions
from enginecast.runtime.bundle.manifest import ShapeRange
from enginecast.runtime.sessions.tensorrt.library import RTX, import_tensorrt


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
    order = order_of(program, folder, outputs, symbols)
    save_network(model := tensorrt_onnx(order), folder)
    onnx.checker.check_model(folder / NETWORK_FILE, full_check=True)
    network = onnx.load(folder / NETWORK_FILE)
    opsets = {found.domain: found.version for found in network.opset_import}
    assert opsets in ({"": 23}, {"": 23, MX[0]: 1})
    require_built(order, model, network)
    return network


def require_built(order: LoweringRequest, model: ir.Model, network: onnx.ModelProto) -> None:
    """The real TensorRT-RTX parses and builds what lies in the folder, where its wheel exists."""
    try:
        trt = import_tensorrt("this test", RTX)
    except MissingError:
        return
    profile = []
    for value in network.graph.input:
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        three = [tuple(size or free for size in sizes) for free in (3, 4, 8)]
        profile.append(
            ShapeRange(name=value.name, least=three[0], optimal=three[1], greatest=three[2])
        )
    job = Job(trt, replace(order, options=TensorRTRTXOptions()), (tuple(profile),), {})
    build_plan(job, parsed(trt, order.folder / NETWORK_FILE, model), 0)


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
    """The outputs of a network on ONNX Runtime's CPU provider, 16-bit values in fp32."""
    copy = onnx.ModelProto()
    copy.CopyFrom(network)
    widen(copy)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # Node by node, as written: ONNX Runtime's optimizers make integer products of fp8 ones, and
    # round biases to integers.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        copy.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
    given = [x.float() if x.is_floating_point() else x for x in inputs]
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), given, strict=True)}
    return tuple(torch.from_numpy(np.asarray(found)) for found in session.run(None, feeds))
