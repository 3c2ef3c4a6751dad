"""What is patched in torch while a model is traced, as one table by dotted path.

A patch stands only as long as a trace.  It is for the versions of torch that have what it names;
another one goes without it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor, nn
from torch._subclasses import fake_tensor
from torch.fx import Tracer
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from enginecast.capture.python.locations import calling_place
from enginecast.capture.python.recompile import forward_within, replaced
from enginecast.capture.tracing.patches.equivalents import with_equivalents
from enginecast.errors import CaptureError
from enginecast.library_names import private, private_or_none

MOST_ELEMENTS = 1024
"""Of a tensor whose values a trace remembers: a grid, or lengths, and not a table."""
FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_QUOTIENT = "_enginecast_quotient"


@dataclass(frozen=True)
class Patch:
    """A name of torch's, and what stands for it during a trace."""

    path: str
    """Module or class, and the name in it."""
    made: Callable[[Any], Any]
    """The replacement, from what torch has."""
    versions: str
    """Of torch, in which it was seen to be needed."""
    reason: str

    def active(self) -> Any:
        owner_path, _, name = self.path.rpartition(".")
        owner = private_or_none(owner_path)
        if owner is None or not hasattr(owner, name):
            return nullcontext()
        return replaced(owner, name, self.made(getattr(owner, name)))


def _sizes_from_none(plain: Any) -> Any:
    def create(self: Any, *, min: int = 0, max: int | None = None) -> SymInt:
        found: SymInt = self.new_dynamic_size(min=min, max=max)
        return found

    return create


def _idle_cast(plain: Any) -> Any:
    def cast(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        parsed = private("torch._C._nn._parse_to", "a cast of a module")
        device, dtype, _, layout = parsed(*args, **kwargs)
        is_idle = layout is None and _has_all(self, device, dtype)
        found: nn.Module = self if is_idle else plain(self, *args, **kwargs)
        return found

    return cast


def _idle_cast_to_float(plain: Any) -> Any:
    return lambda self: self if _has_all(self, None, torch.float32) else plain(self)


def _has_all(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """Whether all tensors of a module are on this device, and those that are cast of this dtype."""
    return all(
        device in (None, tensor.device)
        and (
            dtype in (None, tensor.dtype) or not (tensor.is_floating_point() or tensor.is_complex())
        )
        for tensor in chain(module.parameters(), module.buffers())
    )


def _noting_quotient(plain: Any) -> Any:
    def divided(size: Any, by: Any) -> Any:
        found = plain(size, by)
        if type(by) is int and by > 0 and isinstance(found, SymFloat):
            setattr(found, _QUOTIENT, (size, by))
        return found

    return divided


def _rounding(rounded: Callable[[Any, int], Any], plain: Any) -> Any:
    def run(number: Any) -> Any:
        size, by = getattr(number, _QUOTIENT, (None, 0))
        is_known = size is not None and statically_known_true(size >= 0)
        return rounded(size, by) if is_known else plain(number)

    return run


def _down(size: Any, by: int) -> Any:
    return size // by


def _up(size: Any, by: int) -> Any:
    return -(-size // by)


def _leaving_failed(plain: Any) -> Any:
    def call_module(self: Tracer, m: nn.Module, *args: Any) -> Any:
        depth = len(self.module_stack)
        try:
            return plain(self, m, *args)
        except BaseException:
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            raise

    return call_module


_WHOLE = "torch knows little of rounded quotients of floats, and all of quotients of whole numbers"
_CASTS = "torch replaces each parameter even where a cast changes nothing, which a trace refuses"
PATCHES = (
    Patch(
        "torch._library.fake_impl.FakeImplCtx.create_unbacked_symint",
        _sizes_from_none,
        ">=2.11",
        "fake kernels, such as that of a suppression of boxes, may call this older function, by"
        " which there are two rows or more: one or none would fail",
    ),
    Patch("torch.nn.Module.to", _idle_cast, ">=2.11", _CASTS),
    Patch("torch.nn.Module.float", _idle_cast_to_float, ">=2.11", _CASTS),
    Patch("torch.SymInt.__truediv__", _noting_quotient, ">=2.11", _WHOLE),
    Patch("torch.SymFloat.__ceil__", partial(_rounding, _up), ">=2.11", _WHOLE),
    Patch("torch.SymFloat.__floor__", partial(_rounding, _down), ">=2.11", _WHOLE),
    Patch("torch.SymFloat.__trunc__", partial(_rounding, _down), ">=2.11", _WHOLE),
    Patch(
        "torch.fx.Tracer.call_module",
        _leaving_failed,
        ">=2.11",
        "a submodule that raises an error, which the model catches, stays on the tracer's stack",
    ),
)


def _by_definition(*args: Any) -> Any:
    """What torch's own kernel for CPUs does: score_mod and mask_mod under vmap, then a softmax."""
    name = "torch._higher_order_ops.flex_attention.math_attention"
    return private(name, "flex_attention")(*args)


_COMPILES = (
    "torch compiles the operator where it is called, which leaves nothing to trace or to follow; a"
    " run that a dispatch mode watches even breaks later calls in the same process"
)
OF_FLEX_ATTENTION = (
    Patch(
        f"{FLEX_ATTENTION}.flex_attention_hop",
        lambda plain: _by_definition,
        ">=2.11",
        _COMPILES,
    ),
    Patch(
        f"{FLEX_ATTENTION}._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        lambda plain: True,
        ">=2.11",
        _COMPILES,
    ),
    Patch(
        f"{FLEX_ATTENTION}.setup_compilation_env",
        lambda plain: partial(nullcontext, "eager"),
        ">=2.11",
        _COMPILES,
    ),
)
"""Patched only once a model has imported the module."""


@contextmanager
def libraries_patched(module: nn.Module) -> Iterator[None]:
    """Within the block, torch's functions and the forwards of some classes in `module` are those
    that a trace can follow.
    """
    with ExitStack() as stack:
        stack.enter_context(with_equivalents(module))
        stack.enter_context(flex_attention_spelled_out())
        for patch in PATCHES:
            stack.enter_context(patch.active())
        yield


@contextmanager
def flex_attention_spelled_out() -> Iterator[None]:
    """Within the block, `flex_attention` computes what it is defined as, if it is imported."""
    with ExitStack() as stack:
        for patch in OF_FLEX_ATTENTION if FLEX_ATTENTION in sys.modules else ():
            stack.enter_context(patch.active())
        yield


@contextmanager
def knowing_constants(_: nn.Module) -> Iterator[None]:
    """Within the block, fake tensors remember the values of small constants.

    `torch.tensor([(height, width)])` is the same in every call, and so is what is computed from it.
    torch remembers that of tensors with one element alone, so that a size that is read out of the
    grid of an image would be data.  What is written to with data is forgotten, by torch, as it is
    there.
    """
    name = "CONSTANT_NUMEL_LIMIT"
    there = hasattr(fake_tensor, name)  # else torch has moved it
    with replaced(fake_tensor, name, MOST_ELEMENTS) if there else nullcontext():
        yield


class _Followed(TorchFunctionMode):
    """What torch.export, when not strict, misreads of calls by the model's code.

    `tensor.data`: it sees neither reads nor writes.  What is read shares its memory with the
    tensor, and so does `detach()`.

    `as_tensor` of a size: it takes that for a number, as it does not in `tensor`.

    Switches of autograd modes, which change no value: it would put them into the program, and then
    split it at each into subgraphs.  It does not find its way in one that has branches besides.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is Tensor.data:
            if func.__name__ == "__get__":
                return args[0].detach()
            place = calling_place()
            raise CaptureError(
                f"forward sets the data of a tensor{f' at {place}' if place else ''}, which "
                "torch.export does not see",
                hint="Write into the tensor, `y.copy_(z)`, or use the new one, `y = z`.",
            )
        if func is torch.as_tensor and args and isinstance(args[0], SymInt):
            number: Any = args[0]
            dtype, device = (kwargs or {}).get("dtype"), (kwargs or {}).get("device")
            return torch.scalar_tensor(number, dtype=dtype or torch.int64, device=device)
        if func is _SWITCH:
            with torch._C.DisableTorchFunction():  # else the modes below record it
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_SWITCH = private_or_none("torch._C._set_grad_enabled")


def forward_patched(module: nn.Module) -> AbstractContextManager[None]:
    """Let `module.forward` run so that torch.export follows it."""
    return forward_within(module, _Followed)
