"""The bias and the mask of an attention, in the forms that readers of ONNX take."""

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.graph_edit import aten, dtype_of, insert, same_size, shape_of


def full_bias(program: ExportedProgram, node: Node) -> None:
    """ONNX Runtime's attention ops want a 4-D bias with full [tokens, key tokens]; anything less is
    refused at run time.
    """
    graph = program.graph
    query, key, _, bias = node.args[:4]
    if bias is None:
        return
    assert isinstance(query, Node)
    assert isinstance(key, Node)
    assert isinstance(bias, Node)
    dim = token_dim(query)
    with graph.inserting_before(node):
        while len(shape_of(bias)) < 4:
            bias = insert(graph, aten.unsqueeze.default, (bias, 0), like=node)
        wanted = (shape_of(query)[dim], shape_of(key)[dim])
        if not all(map(same_size, shape_of(bias)[2:], wanted)):
            rows = size_of(program, query, dim, node)
            columns = size_of(program, key, dim, node)
            bias = insert(graph, aten.expand.default, (bias, [-1, -1, rows, columns]), like=node)
    node.update_arg(3, bias)


def tensorrt_attention(program: ExportedProgram, node: Node) -> None:
    """What TensorRT's IAttention takes (its API reference, and the parser's AttentionHelpers.cpp):

    * a mask or `causal`, never both; and `causal` says nothing of keys of another length, so both
      become a bias then;
    * a bias in the dtype of the query, or bool.  A row of the latter that is all False has no
      result by ONNX's definition (a softmax of -inf), and NaN in a row of padding spreads to all
      that read its key; so a bool becomes a bias that is finite;
    * a scale that the parser takes the root of.
    """
    query, key, _, bias = node.args[:4]
    assert isinstance(query, Node)
    assert isinstance(key, Node)
    with program.graph.inserting_before(node):
        if float(node.args[6]) < 0:  # type: ignore[arg-type]
            negative = insert(program.graph, aten.neg.default, (query,), like=node)
            node.args = (negative, *node.args[1:6], -node.args[6], node.args[7])  # type: ignore[operator]
        dim = token_dim(query)
        same = same_size(shape_of(query)[dim], shape_of(key)[dim])
        if node.args[7] and (bias is not None or not same):
            bias = _with_causal(program, node, bias)  # type: ignore[arg-type]
            node.update_arg(7, False)
        if isinstance(bias, Node):
            node.update_arg(3, _additive(program, bias, node))
    full_bias(program, node)


def _with_causal(program: ExportedProgram, node: Node, bias: Node | None) -> Node:
    """A bias that also keeps each token from later ones."""
    graph = program.graph
    query, key = node.args[:2]
    assert isinstance(query, Node)
    assert isinstance(key, Node)
    sizes = [size_of(program, source, token_dim(query), node) for source in (query, key)]
    every = insert(graph, aten.new_ones.default, (query, sizes), {"dtype": torch.bool}, like=node)
    seen = insert(graph, aten.tril.default, (every,), like=node)
    if bias is None:
        return seen
    if dtype_of(bias) == torch.bool:
        return insert(graph, aten.logical_and.default, (bias, seen), like=node)
    allowed = _additive(program, seen, node)
    bias = _additive(program, bias, node)
    return insert(graph, aten.add.Tensor, (bias, allowed), like=node)


def _additive(program: ExportedProgram, bias: Node, node: Node) -> Node:
    """Half the lowest number stands for False: what is added to it stays finite."""
    graph = program.graph
    wanted = dtype_of(node)
    assert wanted is not None
    if dtype_of(bias) == wanted:
        return bias
    if dtype_of(bias) != torch.bool:
        return insert(graph, aten.to.dtype, (bias, wanted), like=node)
    hidden = insert(graph, aten.logical_not.default, (bias,), like=node)
    wide = insert(graph, aten.to.dtype, (hidden, wanted), like=node)
    lowest = torch.finfo(wanted).min / 2
    return insert(graph, aten.mul.Tensor, (wide, lowest), like=node)


def token_dim(query: Node) -> int:
    """Where the tokens are in a query: [batch, tokens, width] or [batch, heads, tokens, size]."""
    return 1 if len(shape_of(query)) == 3 else 2


def size_of(program: ExportedProgram, source: Node, dim: int, like: Node) -> Node | int:
    """A size as an argument: a number, or a node that gives it."""
    size = shape_of(source)[dim]
    if isinstance(size, int):
        return size
    return insert(program.graph, aten.sym_size.int, (source, dim), like=like)
