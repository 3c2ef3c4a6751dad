"""A model as a function of positional tensors, on a copy of it: what can be scripted and traced."""

import torch
from torch import Tensor, nn

from enginecast.capture.factory import copy_sharing_weights
from enginecast.capture.outputs import run_named
from enginecast.capture.wanted import Wanted
from enginecast.capture.widened import WidenedWeight
from enginecast.errors import CaptureError


class Positional(nn.Module):
    """The model as a function of positional tensors that returns a tuple of them."""

    def __init__(
        self, model: nn.Module, inputs: tuple[str, ...], wanted: Wanted, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.wanted = wanted
        self.dtype = dtype
        self.outputs: tuple[str, ...] = ()

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        given = [
            a.to(self.dtype) if a.is_floating_point() and a.dtype != self.dtype else a
            for a in arguments
        ]
        named = run_named(self.model, dict(zip(self.inputs, given, strict=True)), self.wanted)
        self.outputs = tuple(named)
        return tuple(named.values())


def refuse_state(outer: Positional, arguments: tuple[Tensor, ...]) -> None:
    """An engine must give the same for the same inputs: refuse a model that keeps something."""
    before = {name: tensor.clone() for name, tensor in outer.model.named_buffers()}
    outer(*arguments)
    for name, tensor in outer.model.named_buffers():
        old = before.get(name)
        if old is None or old.shape != tensor.shape or not torch.equal(old, tensor):
            raise CaptureError(
                f"forward writes into the buffer {name}, and an engine cannot keep it",
                hint="Return the new value instead, or switch the update off in eval mode.",
            )


def own_copy(module: nn.Module) -> nn.Module:
    """A copy in eval mode; weights that are widened as they are read become fp32 ones."""
    copy = copy_sharing_weights(module).eval().requires_grad_(False)
    widened: dict[int, nn.Parameter] = {}
    for owner in copy.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if isinstance(tensor, WidenedWeight):
                    stored = tensor.stored
                    made = widened.get(id(stored)) or nn.Parameter(stored.float(), False)
                    widened[id(stored)] = made
                    tensors[name] = made
    return copy
