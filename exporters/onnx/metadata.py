"""What the nodes of a graph say of where they come from."""

import ast
import contextlib
from collections.abc import Iterator

import onnx_ir as ir

from enginecast.passes.ir.source import line_of
from enginecast.version import __version__

MODULE = "enginecast.module"
"""Key of a node's metadata: the dotted path of the module that it was made for."""
LINE = "enginecast.line"
"""Key of a node's metadata while the graph is in memory: "modeling_t5.py:66"."""


def plain_metadata(model: ir.Model) -> None:
    """Keep where a node comes from; drop stack traces, which hold paths of this machine."""
    model.producer_name, model.producer_version = "enginecast", __version__
    model.graph.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        # The scopes of a node, as text: root, modules from the outside in, the node itself.
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        line = line_of(node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
        node.doc_string = None
        node.metadata_props.clear()
        if len(scopes) > 2 and scopes[-2]:
            node.metadata_props[MODULE] = scopes[-2]
        if line:
            node.metadata_props[LINE] = line
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


@contextlib.contextmanager
def without_lines(model: ir.Model) -> Iterator[None]:
    """The same graph without lines of source, for what is published."""
    lines = {
        node: node.metadata_props.pop(LINE)
        for node in model.graph.all_nodes()
        if LINE in node.metadata_props
    }
    try:
        yield
    finally:
        for node, line in lines.items():
            node.metadata_props[LINE] = line
