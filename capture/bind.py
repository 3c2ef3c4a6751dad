"""Give a program that was captured without weights the tensors of the checkpoint.

A weight stored in another float dtype than the program computes in stays as it is stored.  A
*binding cast* stands between its placeholder and its users:

    before  %w: f32[8, 4]                          after  %w: bf16[8, 4]
            %y = linear(%x, %w)                           %w_f32: f32[8, 4] = aten.to.dtype(%w, f32)
                                                          %y = linear(%x, %w_f32)

so the program computes what fp32 eager computes with the same weights widened, bit for bit.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import Node

from enginecast.errors import SourceError

STORED = (InputKind.PARAMETER, InputKind.BUFFER)


def bind_weights(program: ExportedProgram, weights: Mapping[str, Tensor]) -> None:
    """Put `weights` into `program`, in place, with binding casts where dtypes differ.

    Args:
        program: a program whose state dict holds fake tensors.
        weights: a tensor for each name in the program's state dict; kept as it is, not copied.

    Raises:
        SourceError: a tensor is missing, or has another shape than the program was captured with.
    """
    state = {name: _checked(name, fake, weights) for name, fake in program.state_dict.items()}
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    last = list(placeholders.values())[-1]
    for spec in program.graph_signature.input_specs:
        if spec.kind not in STORED or spec.target not in state:
            continue
        node = placeholders[spec.arg.name]
        stored = state[spec.target].dtype
        if node.meta["val"].dtype == stored:
            continue
        wide = _retype(node, stored)
        if node.users:  # the second name of a tied weight has none
            last = _insert_cast(node, wide, last)
            _rename_output(program, node.name, last.name)
    program._state_dict = state
    program.graph_module.recompile()


def _checked(name: str, fake: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    tensor = weights.get(name)
    if tensor is None:
        raise SourceError(f"the weights hold no tensor for {name}")
    if tensor.shape != fake.shape:
        raise SourceError(
            f"{name} has shape {list(tensor.shape)}, the model expects {list(fake.shape)}"
        )
    if isinstance(fake, nn.Parameter):
        return nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor.detach()


def _retype(placeholder: Node, stored: torch.dtype) -> Tensor:
    """Make `placeholder` one of dtype `stored`; return the fake tensor that it was."""
    wide: Tensor = placeholder.meta["val"]
    mode = placeholder.meta["val"].fake_mode
    with mode:
        placeholder.meta["val"] = torch.empty_strided(
            wide.shape, wide.stride(), dtype=stored, device=wide.device
        )
    placeholder.meta.pop("tensor_meta", None)
    return wide


def _insert_cast(placeholder: Node, wide: Tensor, after: Node) -> Node:
    """Send the users of `placeholder` to a cast of it, which is put behind `after`."""
    users = list(placeholder.users)
    graph = placeholder.graph
    with graph.inserting_after(after):
        cast = graph.create_node(
            "call_function",
            torch.ops.aten.to.dtype,
            (placeholder, wide.dtype),
            name=f"{placeholder.name}_f32",
        )
    cast.meta["val"] = wide.detach()
    for user in users:
        user.replace_input_with(placeholder, cast)
    return cast


def _rename_output(program: ExportedProgram, old: str, new: str) -> None:
    """Follow a weight that is returned; the signature's own hook would rename the input too."""
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument) and spec.arg.name == old:
            spec.arg.name = new
