"""Ask the installed parser whether it takes an ONNX model, without the model's weights."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

from enginecast.exporters.tensorrt.gate.violations import Violation, at
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger
from enginecast.runtime.sessions.tensorrt.library import library_of

LARGE = 1 << 16
"""Bytes of a weight that the parser gets as zeros: it reads the values of scales, axes and sizes,
which are small."""
STEP = 64
"""Bytes from one weight's zeros to the next one's."""
WEIGHTS = "weights"
"""File that a model without weights names; there is none."""
_PARTS = (
    r"Error is: (.*?)[;.] ?",
    r"\] (Could not infer output types) ",
    r"failed\. (\S.* has no runners .*)",
    r"Error \((.*?) In \S+ at /",
    r"Assertion failed: \S.*?: (.*)",
    r'&& "(.*)"$',
)
"""What a message says, within what it says of TensorRT's own sources."""


def check_parsed(trt: Any, model: ir.Model) -> list[Violation] | None:
    """What the parser refuses of a model; it stops at the first node.

    Args:
        trt: the module of the library.
        model: its weights may be lazy: those that are large are not computed.

    Returns:
        None where there is no builder, for want of a GPU or a driver.
    """
    messages = Messages()
    logger = error_logger(trt, messages)
    try:
        builder = trt.Builder(logger)
    except (TypeError, RuntimeError):
        return None
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    with _without_weights(model) as (proto, sizes):
        # Pages that are never touched.  Weights are told apart by their address.
        zeros = np.zeros(max(sizes.values(), default=0) + STEP * len(sizes), np.uint8)
        taken = parser.load_model_proto(proto)
        for number, (name, size) in enumerate(sizes.items()):
            place = zeros.ctypes.data + STEP * number
            taken = taken and parser.load_initializer(name, place, size)
        if taken and parser.parse_model_proto():
            return []
    nodes = {node.name: node for node in model.graph.all_nodes()}
    expected = f"what {library_of(trt).version(trt)} parses"
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        said, node = shortened(error.desc()), nodes.get(error.node_name())
        if node is None:
            found.append(Violation("parser", "", error.node_operator(), "", "", expected, said))
        else:
            found.append(at(node, "parser", expected, said))
    return found or [Violation("parser", "", "", "", "", expected, messages.take())]


def shortened(said: str) -> str:
    """A message of TensorRT's without the places in its sources."""
    text = " ".join(said.split())
    for pattern in _PARTS:
        found = re.search(pattern, text)
        text = found[1] if found else text
    return "no importer" if text == "false" else text


@contextmanager
def _without_weights(model: ir.Model) -> Iterator[tuple[bytes, dict[str, int]]]:
    """The model as bytes, with the sizes of the weights that it only names."""
    kept = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > LARGE
    }
    try:
        for name, tensor in kept.items():
            model.graph.initializers[name].const_value = ir.ExternalTensor(
                *(WEIGHTS, 0, tensor.nbytes, tensor.dtype),
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
            )
        proto = ir.to_proto(model).SerializeToString()
    finally:
        for name, tensor in kept.items():
            model.graph.initializers[name].const_value = tensor
    yield proto, {name: tensor.nbytes for name, tensor in kept.items()}
