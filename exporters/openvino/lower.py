"""Lower a program to an ONNX graph for OpenVINO: one graph file, one weights file."""

import re
from dataclasses import replace

import onnx_ir as ir

from enginecast.errors import LoweringError
from enginecast.exporters.files import all_or_none
from enginecast.exporters.onnx.lower import describe, onnx_model, save_model
from enginecast.exporters.onnx.lower import lowering as onnx_lowering
from enginecast.exporters.onnx.metadata import LINE, MODULE
from enginecast.exporters.openvino.numbers import require_numbers
from enginecast.exporters.target import Artifact, LoweringRequest
from enginecast.runtime.sessions.openvino import MINIMUM, require_openvino, said_by

_LACKED = re.compile(r"(\w+)-\d+\b")
"""How it names an op that it lacks, with the opset: "Det-23"."""
GRAPH_FILE, WEIGHTS_FILE = "openvino.onnx", "openvino.safetensors"
"""Of their own, for an engine for ONNX Runtime may lie beside them."""
_SHOWN = 5
"""Ops that a message holds."""


def lowering() -> str:
    """The passes that bring a program into the form that OpenVINO reads, as a spec."""
    return onnx_lowering("openvino")


def lower_to_openvino(request: LoweringRequest) -> Artifact:
    """Write `openvino.onnx` and `openvino.safetensors`.

    Raises:
        LoweringError: an op has no form in ONNX, or none that OpenVINO takes, or a value is of a
            dtype that OpenVINO computes in a smaller one.  No file is left then.
        MissingError: OpenVINO is not installed.
    """
    openvino = require_openvino("--target openvino")
    require_numbers(request)
    model = onnx_model(request, "openvino")
    files = save_model(model, request.folder, graph=GRAPH_FILE, weights=WEIGHTS_FILE)
    with all_or_none(request.folder, files):
        try:
            openvino.Core().read_model(request.folder / files[0])
        except Exception as error:  # OpenVINO raises RuntimeError, and others of pybind11
            raise LoweringError(
                f"OpenVINO does not take this graph: {_explain(error, model)}",
                hint="Use --target onnxruntime.",
            ) from error
    return replace(describe(model, files), minimum_runtime=MINIMUM)


def _explain(error: Exception, model: ir.Model) -> str:
    """The ops that it names, with their places in the user's code; else its own words."""
    named = set(_LACKED.findall(str(error)))
    nodes = [node for node in model.graph.all_nodes() if node.op_type in named]
    places = {
        f"{node.op_type} (module '{known.get(MODULE, '')}', {known.get(LINE, 'no source line')})"
        for node in nodes
        for known in [node.metadata_props]
    }
    lacked = "; ".join(sorted(places)[:_SHOWN])
    return f"it has no {lacked}" if lacked else said_by(error)
