"""Small ONNX graphs as text, for the tests of the TensorRT gate."""

from collections.abc import Mapping
from typing import Any

import onnx
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir

HEAD = '<ir_version: 11, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
FLOAT, HALF, DOUBLE = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE
E4M3, E5M2, FNUZ = (
    ir.DataType.FLOAT8E4M3FN,
    ir.DataType.FLOAT8E5M2,
    ir.DataType.FLOAT8E4M3FNUZ,
)
INT4, INT8, INT64 = ir.DataType.INT4, ir.DataType.INT8, ir.DataType.INT64


def model_of(
    text: str, constants: Mapping[str, tuple[Any, ir.DataType]] | None = None, *, opset: int = 23
) -> ir.Model:
    """A model of the text of a graph: "(float[batch] x) => (float[batch] y) { y = Relu(x) }".

    Its nodes have a module and a line of the user's code; `constants` are values and dtypes of
    initializers.
    """
    parsed = onnx.parser.parse_model(f"{HEAD.format(opset=opset)}\nnetwork {text}")
    for name, (values, dtype) in (constants or {}).items():
        numpy = ir.tensor(values, dtype=FLOAT if dtype != INT64 else INT64).numpy()
        tensor = ir.Tensor(numpy.astype(dtype.numpy()), dtype=dtype, name=name)
        parsed.graph.initializer.append(ir.to_proto(tensor))
    model = ir.from_proto(onnx.shape_inference.infer_shapes(parsed))
    for node in model.graph.all_nodes():
        node.name = f"node_{node.outputs[0].name}"
        node.metadata_props["enginecast.module"] = "layer.1"
        node.metadata_props["enginecast.line"] = "model.py:12"
    return model
