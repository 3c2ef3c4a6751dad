"""Keep ONNX Runtime from moving a padding with zeros into a max pool, where it is one with -inf.

Its optimizer (PadFusion, basic level, seen in 1.31) takes a Pad with the value 0 before a MaxPool
for the pool's own padding.  Where all values of a window are negative the result is another one:
BiT's stem was off by 4 %.  The fusion passes a Pad by that names its axes.
"""

import numpy as np
import onnx_ir as ir


def keep_pads_of_max_pools(model: ir.Model) -> None:
    """Name the axes of every Pad that a MaxPool reads, in place; the same computation."""
    for node in model.graph.all_nodes():
        readers = [use.node.op_type for output in node.outputs for use in output.uses()]
        if node.op_type == "Pad" and "MaxPool" in readers:
            _name_axes(model, node)


def _name_axes(model: ir.Model, node: ir.Node) -> None:
    source, _, *rest = node.inputs
    if source is None or source.shape is None or len(rest) > 1:
        return
    axes = np.arange(len(source.shape), dtype=np.int64)
    value = ir.Value(name=f"{node.outputs[0].name}_axes", const_value=ir.tensor(axes))
    value.shape, value.dtype = ir.Shape(axes.shape), ir.DataType.INT64
    model.graph.register_initializer(value)
    node.resize_inputs(4)
    node.replace_input_with(3, value)
