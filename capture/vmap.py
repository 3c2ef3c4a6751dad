"""Programs without `torch.vmap`.

A non-strict export of a model that calls vmap, as transformers does for some attention masks, holds
calls that open and close levels of batching.  They only work in the order of one whole run, and
say nothing of the shapes between them.  Tracing the program again resolves them into plain ops.
"""

import torch
from torch._functorch import predispatch
from torch.export import ExportedProgram

from enginecast.capture.quiet import quiet_torch

LEVELS = frozenset(
    {
        predispatch._add_batch_dim,
        predispatch._remove_batch_dim,
        predispatch._vmap_increment_nesting,
        predispatch._vmap_decrement_nesting,
    }
)


def without_vmap(program: ExportedProgram) -> ExportedProgram:
    """Return `program` itself when it has no vmap, else one without, with no op decomposed.

    The second loses the casts to a dtype that a value has already, which tell `unify-dtype` where
    the source wants fp32.
    """
    if not any(node.target in LEVELS for node in program.graph.nodes):
        return program
    with torch.no_grad(), quiet_torch():
        plain: ExportedProgram = program.run_decompositions({})
    for node in plain.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            # It was a reshape, and holds for today's strides alone.  No op writes any more, so
            # that a copy is as good.
            node.target = torch.ops.aten.reshape.default
    plain.graph_module.recompile()
    return plain
