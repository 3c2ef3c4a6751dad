"""Compute what depends on weights and literals alone."""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.graph_edit import weight_specs, weight_tensor


def weight_value(program: ExportedProgram, node: Node) -> Any:
    """The value of a weight expression; a stored weight is shared, not copied."""
    specs = weight_specs(program)

    def load(source: Node) -> Any:
        if source.op == "placeholder":
            return weight_tensor(program, specs[source.name]).detach()
        args = torch.fx.map_arg(source.args, load)
        kwargs = torch.fx.map_arg(source.kwargs, load)
        assert callable(source.target)
        with torch.no_grad():
            return source.target(*args, **kwargs)

    return load(node)
