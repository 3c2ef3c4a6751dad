"""Calls: what is called, with what, and what becomes of it where it is not walked through."""

import ast
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.refusal import is_user_code
from enginecast.capture.taint import (
    Value,
    constant,
    guess,
    mix,
    scalar,
    tensor_from,
)
from enginecast.capture.taint_builtins import call_builtin
from enginecast.capture.taint_frame import Arguments, Frame, Local
from enginecast.capture.taint_lookup import Bound
from enginecast.capture.taint_methods import method_call
from enginecast.capture.taint_places import OneOf
from enginecast.capture.taint_tensors import is_math, python_number, torch_call

REGISTER = (nn.Module.register_buffer, nn.Module.register_parameter, nn.Module.__setattr__)


def unwrapped(function: Any, arguments: Arguments) -> tuple[Any, Arguments]:
    """What is really called: partials, bound methods and caches are opened."""
    for _ in range(20):
        if isinstance(function, Bound):
            arguments = arguments.prepend(function.receiver)
            function = function.function
        elif isinstance(function, types.MethodType):
            arguments = arguments.prepend(constant(function.__self__))
            function = function.__func__
        elif isinstance(function, functools.partial):
            named = {name: constant(each) for name, each in function.keywords.items()}
            positional = tuple(map(constant, function.args))
            arguments = Arguments(
                (*positional, *arguments.positional),
                {**named, **arguments.named},
                arguments.rest,
            )
            function = function.func
        elif isinstance(function, functools._lru_cache_wrapper) or _is_wrapper_of_torch(function):
            function = function.__wrapped__
        else:
            break
    return function, arguments


def _is_wrapper_of_torch(function: Any) -> bool:
    """A decorator of torch's own (no_grad) around a function of the user."""
    if not isinstance(function, types.FunctionType) or not hasattr(function, "__wrapped__"):
        return False
    return not is_user_file(function.__code__.co_filename)


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether code of this file is to be walked through; code that was made has no file."""
    is_made = file.startswith("<") and not file.startswith(("<eval_with_key", "<frozen"))
    return is_made or is_user_code(file)


def is_torch(function: Any) -> bool:
    """Whether a callable belongs to torch."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    module = getattr(function, "__module__", None) or ""
    if not isinstance(module, str):
        return False
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    is_of_tensor = isinstance(owner, type) and issubclass(owner, torch._C.TensorBase)
    return module.split(".")[0] == "torch" or is_of_tensor or owner is torch._C._VariableFunctions


def outside_call(function: Any, arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    """A callable that is not walked through: Python's, torch's, another library's, a class."""
    found = call_builtin(function, arguments, frame, node)
    if found is None and isinstance(function, types.MethodDescriptorType) and arguments.positional:
        receiver, *others = arguments.positional
        passed = Arguments(tuple(others), arguments.named, arguments.rest)
        found = method_call(receiver, function.__name__, passed, frame, node)
    if found is not None:
        return found
    if is_math(function) and len(arguments.positional) == 1:
        return python_number(function, arguments.positional[0], frame, node)
    if function in REGISTER:
        owner = arguments.positional[0]
        frame.meet("state", node, owner, blocking=True)
        return constant(None)
    if is_torch(function):
        return torch_call(function, arguments, frame, node)
    values = arguments.all
    module = str(getattr(function, "__module__", "") or "")
    made = mix(values)
    if module.split(".")[0] == "numpy" and made.tensor:
        return frame.read("numpy", node, made, blocking=True)
    if isinstance(function, type) and not issubclass(function, nn.Module | Tensor):
        return _instance(function, arguments)
    if callable(function) and made.tensor and _is_compiled(function, module):
        frame.meet("not-scanned", node, made, blocking=False)
    return guess(values)


def _instance(kind: type, arguments: Arguments) -> Value:
    """An object that the code makes: dataclasses and outputs keep their fields."""
    names = list(getattr(kind, "__dataclass_fields__", {}))
    fields = dict(zip(names, arguments.positional, strict=False)) | dict(arguments.named)
    if fields and (names or not arguments.positional):
        absent = {name: constant(None) for name in names if name not in fields}
        return Value(fields=fields | absent)
    return guess(arguments.all)


def _is_compiled(function: Any, module: str) -> bool:
    """Code of an extension: there is no source of it to look at."""
    if isinstance(function, types.FunctionType | type | nn.Module):
        return False
    is_builtin = isinstance(function, types.BuiltinFunctionType)
    return is_builtin and module.split(".")[0] not in ("", "builtins", "torch", "math", "operator")


CALLED_BACK = (
    *(types.FunctionType, types.MethodType, functools.partial, nn.Module),
    *(Bound, Local, OneOf),
)


def called_back(arguments: Arguments) -> Iterable[Value]:
    """Functions of the user that are handed to a function that is not walked through."""
    for value in arguments.all:
        for each in (value, *(value.items or ())):
            if isinstance(each.const, CALLED_BACK):
                yield each


def data_of(arguments: Arguments) -> Value:
    """What a function gets that is called back: any of the tensors that go along."""
    values = [
        value
        for value in arguments.all
        if not isinstance(value.const, Local | Bound) and not callable(value.const)
    ]
    made = mix(values)
    return tensor_from(values) if made.tensor else scalar(values)


def is_apply(target: Any, arguments: Arguments) -> bool:
    """`apply` of a torch.autograd.Function: it runs the class's forward."""
    owner = arguments.positional[0].const if arguments.positional else None
    is_function = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return is_function and getattr(target, "__name__", "") == "apply"
