"""Modules without weights: parameters on the meta device, or fake in one FakeTensorMode."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


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

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def empty_copy(module: nn.Module) -> nn.Module:
    """Copy `module` in fp32, with what its state dict holds on the meta device."""
    stored = module.state_dict(keep_vars=True)
    memo: dict[int, object] = {id(tensor): _on_meta(tensor) for tensor in stored.values()}
    empty = copy.deepcopy(module, memo).float().eval()
    return empty.requires_grad_(False)


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
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                fake = fakes.setdefault(id(parameter), _fake(parameter, mode))
                owner._parameters[name] = fake
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = fakes.setdefault(id(buffer), _fake(buffer, mode))


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake
