"""Code that behaves otherwise while it is traced, and memory that eager shares."""

import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, normal

CASES = Group("traced", "code that behaves otherwise while it is traced")
refused, either, right = CASES.refused, CASES.either, CASES.right
X = normal(2, 8)

WAYS = {
    "is exporting": lambda x: torch.compiler.is_exporting(),
    "is compiling": lambda x: torch.compiler.is_compiling(),
    "dynamo compiling": lambda x: (
        torch._dynamo.is_compiling() if "torch._dynamo" in sys.modules else False
    ),
    "is in onnx export": lambda x: torch.onnx.is_in_onnx_export(),
    "jit tracing": lambda x: torch._C._get_tracing_state() is not None,
    "jit scripting": lambda x: torch._jit_internal.is_scripting(),
    "exact type": lambda x: type(x) is not torch.Tensor,
    "name of the type": lambda x: "Fake" in type(x).__name__,
    "name of the class": lambda x: x.__class__.__name__ != "Tensor",
    "text": lambda x: "fake" in repr(x).lower(),
    "pointer": lambda x: _pointer(x) == 0,
    "device meta": lambda x: x.is_meta,
    "modules loaded": lambda x: "torch._export" in sys.modules and torch.compiler.is_exporting(),
    "dispatch mode": lambda x: torch._C._len_torch_dispatch_stack() > 0,
    "function mode": lambda x: torch._C._len_torch_function_stack() > 0,
    "call stack": lambda x: any("export" in f.f_code.co_filename for f in _frames()),
    "has a fake mode": lambda x: hasattr(x, "fake_mode"),
    "grad mode": lambda x: torch.is_grad_enabled(),
    "requires grad": lambda x: (x * 1).requires_grad,
    "inference mode": lambda x: torch.is_inference_mode_enabled(),
    "subclass": lambda x: isinstance(x, torch._subclasses.FakeTensor),
    "value cannot be read": lambda x: _unreadable(x),
    "environment": lambda x: threading.current_thread() is not threading.main_thread(),
    "storage is there": lambda x: _bytes(x) is None,
    "size is symbolic": lambda x: not isinstance(x.shape[0], int),
}


def _pointer(x: Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0


def _frames() -> Any:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame


def _unreadable(x: Tensor) -> bool:
    try:
        float(x.sum())
    except Exception:
        return True
    return False


def _bytes(x: Tensor) -> Any:
    try:
        return x.numpy().tobytes()
    except Exception:
        return None


for name, way in WAYS.items():
    either(
        name,
        lambda self, x, way=way: x * 5 if way(x) else x * 2,
        x=X,
        is_quick=name in ("is exporting", "exact type", "pointer"),
    )


class Fallback(nn.Module):
    """Falls back silently to something cruder where the exact way fails."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return x * float(np.asarray(x).max())
        except Exception:
            return x * 1.0


class Patched(nn.Module):
    """Its own forward while exported is another one."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.simple(x)
        return x.softmax(-1)

    def simple(self, x: Tensor) -> Tensor:
        e = x.exp()
        return e / e.sum(-1, keepdim=True)


class Same(nn.Module):
    """Two ways to the same values: nothing is wrong with it."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return x + x
        return x * 2


def aliased_contiguous(self: nn.Module, x: Tensor) -> Tensor:
    """`contiguous` copies, unless there is nothing to copy: at batch 1 the write is seen."""
    y = x * 1.0
    z = y.transpose(0, 1).contiguous()
    z.add_(1.0)
    return y


def aliased_reshape(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 1.0
    z = y.transpose(0, 1).reshape(-1)
    z.mul_(2.0)
    return y


def aliased_flatten(self: nn.Module, x: Tensor) -> Tensor:
    y = x.expand(x.shape[0], x.shape[1]) * 1.0
    y.mT.flatten().zero_()
    return y


def aliased_to(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 1.0
    y.to(torch.float32).add_(1.0)  # the same tensor: nothing to convert
    return y


def aliased_float(self: nn.Module, x: Tensor) -> Tensor:
    y = x.sin()
    y.float().mul_(2.0)
    y.type_as(x).add_(0.5)
    return y


def aliased_expand(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 1.0
    y.expand(x.shape[0], 8).reshape(x.shape[0], 8).add_(1.0)
    return y


def aliased_numpy(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 1.0
    y.numpy()[0] = 3.0
    return y


def caught(self: nn.Module, x: Tensor) -> Tensor:
    try:
        return x.view(-1, 7)
    except RuntimeError:
        return x * 2


def numpy_of_zeros(self: nn.Module, x: Tensor) -> Tensor:
    table = torch.zeros(8)
    table.numpy()[:] = 3.0
    return x + table


class Named(Tensor):
    """A tensor of a class of its own."""


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if bool(x.sum() > 0) else x - 1.0


class Parts(nn.Module):
    """A part that is TorchScript before a layer."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.part, self.layer = make(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.part(x))
        return out


def traced_part() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return quietly(lambda: torch.jit.trace(layers, torch.zeros(2, 8)))


def scripted_part() -> nn.Module:
    return quietly(lambda: torch.jit.script(Halved()))


def quietly(make: Callable[[], Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        part: nn.Module = make()
    return part


def warned(self: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        y = torch.floor(x)
    return y * (1 + len(seen))


either("falls back", Fallback, x=X)
right("simpler while compiled", Same, x=X)
either("cruder while compiled", Patched, x=X)
either("contiguous that aliases", aliased_contiguous, x=X, dynamic=("x:0=1..8",), is_quick=True)
either("reshape that aliases", aliased_reshape, x=X, dynamic=("x:0=1..8",))
either("flatten that aliases", aliased_flatten, x=X, dynamic=("x:0=1..8",))
either("contiguous that aliases at one", aliased_contiguous, x=normal(1, 8))
right("to that aliases", aliased_to, x=X)
right("float that aliases", aliased_float, x=X)
either("expand that aliases", aliased_expand, x=X)
right("numpy that aliases", aliased_numpy, x=X)
right("numpy of zeros, written", numpy_of_zeros, x=X)
right("an error that is caught", caught, x=X)
right("a class of tensors", lambda self, x: x.as_subclass(Named).square() + 1, x=X)
right("a part that is traced", partial(Parts, traced_part), x=X)
either("a part that is scripted and branches", partial(Parts, scripted_part), x=X, is_quick=True)
either("derivatives forward", lambda self, x: torch.func.jacfwd(torch.sin)(x), x=normal(4))
right("warnings counted", warned, x=X)
either(
    "dropout by training flag of another",
    lambda self, x: F.dropout(x, 0.5, training=not torch.compiler.is_compiling() and False),
    x=X,
)
either("random seed inside", lambda self, x: (torch.manual_seed(0), x + torch.rand(8))[1], x=X)
refused("random numbers", lambda self, x: x + torch.rand_like(x), x=X)
refused("random permutation", lambda self, x: x[:, torch.randperm(8)].sum(-1), x=X)
