"""The ONNX graph that TensorRT's parser reads, and its files.

Opset 23, ops of ONNX's own alone; every dtype is in the graph, and no op mixes two.  What each op
is said in is decided by the lowering passes, and by `exporters.onnx.translations`.
"""

from pathlib import Path

import onnx_ir as ir

from enginecast.errors import LoweringError
from enginecast.exporters.onnx.lower import onnx_model, save_model
from enginecast.exporters.onnx.metadata import LINE, MODULE
from enginecast.exporters.target import LoweringRequest

NETWORK_FILE = "network.onnx"
NETWORK_WEIGHTS_FILE = "network.safetensors"


def tensorrt_onnx(order: LoweringRequest) -> ir.Model:
    """The graph of an order in memory, its weights promised: computed when they are written.

    Every node has `MODULE` and `LINE` in its metadata where they are known.

    Raises:
        LoweringError: an op has no ONNX form, or values are quantised in one that TensorRT lacks;
            names it with module and source line.
    """
    model = onnx_model(order, "tensorrt")
    _refuse_foreign(model)
    for domain in [name for name in model.opset_imports if name]:
        del model.opset_imports[domain]
    return model


def save_network(model: ir.Model, folder: Path) -> tuple[str, ...]:
    """Write `network.onnx` and beside it the weights that it refers to by name, offset and length.

    Args:
        model: of `tensorrt_onnx`; afterwards it needs the file of weights.
        folder: it exists.

    Returns:
        The names of the files that there are, the graph first.

    Raises:
        LoweringError: a weight came out in another shape or dtype than it was planned in.  No file
            is left then.
    """
    return save_model(model, folder, graph=NETWORK_FILE, weights=NETWORK_WEIGHTS_FILE)


def _refuse_foreign(model: ir.Model) -> None:
    foreign = [node for node in model.graph.all_nodes() if node.domain]
    if foreign:
        node = foreign[0]
        where = f"module '{node.metadata_props.get(MODULE, '')}'"
        raise LoweringError(
            f"TensorRT's parser has no {node.domain}::{node.op_type} ({where},"
            f" {node.metadata_props.get(LINE, 'no source line')})",
            hint="Only ops of ONNX's own can be in an engine for it.",
        )
