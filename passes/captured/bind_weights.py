"""Bind weights to a program that was traced without them, with binding casts where dtypes differ.

A weight stored in another float dtype than the program computes in stays as it is stored. A
*binding cast* stands between its placeholder and its users:

    before  %w: f32[8, 4]                      after  %w: bf16[8, 4]
            %y = linear(%x, %w)                       %w_f32: f32[8, 4] = aten.to.dtype(%w, f32)
                                                      %y = linear(%x, %w_f32)

so the program computes what fp32 eager computes with the same weights widened, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from enginecast.errors import SourceError
from enginecast.library_names import aten
from enginecast.passes.ir.base import CapturePass, PassContext, Site
from enginecast.passes.ir.edit import insert
from enginecast.passes.ir.sites import SiteLog

STORED = (InputKind.PARAMETER, InputKind.BUFFER)


@dataclass(frozen=True)
class BindWeights(CapturePass):
    """Put the model's weights into a program that was traced without them."""

    name: ClassVar[str] = "bind-weights"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log, weights = SiteLog(context), context.weights
        if weights is None:  # a program that was given has its own
            return log.sites
        state = {name: _checked(name, fake, weights) for name, fake in program.state_dict.items()}
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        last = list(placeholders.values())[-1]
        for spec in program.graph_signature.input_specs:
            if spec.kind not in STORED or spec.target not in state:
                continue
            node = placeholders[spec.arg.name]
            wide, stored = node.meta["val"], state[spec.target].dtype
            if wide.dtype == stored:
                continue
            with wide.fake_mode:
                node.meta["val"] = torch.empty_strided(
                    wide.shape, wide.stride(), dtype=stored, device=wide.device
                )
            node.meta.pop("tensor_meta", None)
            log.done(node)
            users = list(node.users)
            if users:  # the second name of a tied weight has none
                with program.graph.inserting_after(last):
                    cast, name = (node, wide.dtype), f"{node.name}_f32"
                    last = insert(program.graph, aten.to.dtype, cast, like=node, name=name)
                for user in users:
                    user.replace_input_with(node, last)
        program._state_dict = state
        return log.sites


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
