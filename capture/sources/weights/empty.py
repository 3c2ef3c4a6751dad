"""Modules without weights: parameters on the meta device, or fake in one FakeTensorMode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from enginecast.capture.python.recompile import replaced
from enginecast.capture.sources.weights.copies import cast_module, copy_module


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers on the meta device; buffers keep their values.

    Building under `torch.device("meta")` would lose the buffers that no checkpoint stores.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A parameter that is on meta already may be tied: it must stay the same object.
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(self, name, param)

    with replaced(nn.Module, "register_parameter", register_on_meta):
        yield


def empty_copy(module: nn.Module, *, casts: bool = True) -> nn.Module:
    """Copy `module`, with what its state dict holds on the meta device; in fp32 if it is cast."""
    stored = module.state_dict(keep_vars=True)
    memo: dict[int, object] = {id(tensor): _on_meta(tensor) for tensor in stored.values()}
    empty = copy_module(module, memo).eval()
    if casts:
        cast_module(empty, torch.float32)
    for parameter in empty.parameters():
        if parameter.is_leaf:
            parameter.requires_grad_(False)
    return empty


def buffers_to_meta(module: nn.Module) -> nn.Module:
    """Move the persistent buffers of `module` to the meta device, in place."""
    stored = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and id(buffer) in stored:
                owner._buffers[name] = buffer.to("meta")
    return module


def _on_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to("meta"), requires_grad=False)
    return tensor.detach().to("meta")


def capture_mode() -> FakeTensorMode:
    """A FakeTensorMode that torch.export accepts for a module that was built outside of it."""
    return FakeTensorMode(
        shape_env=ShapeEnv(tracked_fakes=[], trace_asserts=True),
        allow_non_fake_inputs=True,
        export=True,
    )


def fake_weights(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace each meta tensor of `module` by a fake CPU tensor of `mode`, in place; ties are kept.

    Meta tensors themselves would not do: torch refuses to mix them with CPU inputs.
    """
    fakes: dict[int, Any] = {}
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in fakes:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        is_parameter = isinstance(tensor, nn.Parameter)
                        fakes[id(tensor)] = nn.Parameter(fake, False) if is_parameter else fake
                tensors[name] = fakes[id(tensor)]
