"""Attributes of real objects, looked up without running any code of theirs.

A property or `__getattr__` of a model's class may compute on tensors; what is found here is what
is stored, or the function that would be called.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from enginecast.capture.taint import CLEAN, Value, constant


@dataclass(frozen=True)
class Bound:
    """A function that takes `receiver` as its first argument."""

    function: Any
    receiver: Value


@dataclass(frozen=True)
class Property:
    """A property that the walk must compute."""

    getter: Any


@dataclass(frozen=True)
class Super:
    """`super()` within a method of `owner`."""

    owner: type
    receiver: Value


def stored(obj: object, name: str) -> Value | Property | None:
    """What `obj.name` is; None when that is not known without running code."""
    if isinstance(obj, nn.Module):
        held = _of_module(obj, name)
        if held is not None:
            return held
    if isinstance(obj, PreTrainedConfig):
        return _of_config(obj, name)
    if isinstance(obj, types.FunctionType | types.CodeType | torch.dtype | torch.finfo):
        return constant(getattr(obj, name)) if hasattr(obj, name) else None
    if name == "__class__":
        return constant(type(obj))
    own = _own(obj).get(name, CLEAN)
    if own is not CLEAN and not (isinstance(obj, type) and _is_descriptor(own)):
        return constant(own)
    if isinstance(obj, types.ModuleType):
        return None
    return _of_class(obj, name)


def super_attribute(found: Super, name: str) -> Value | Property | None:
    """`super().name`."""
    receiver = found.receiver.const
    kind = receiver if isinstance(receiver, type) else type(receiver)
    order = kind.__mro__
    after = order[order.index(found.owner) + 1 :] if found.owner in order else order[1:]
    for base in after:
        if name in vars(base):
            return _bind(vars(base)[name], found.receiver, is_class=isinstance(receiver, type))
    return stored(receiver, name) if isinstance(receiver, nn.Module) else None


def _of_module(module: nn.Module, name: str) -> Value | None:
    for table in (module._parameters, module._buffers, module._modules):
        if name in table:
            return _held(table[name], name)
    own = vars(module).get(name, CLEAN)
    if isinstance(own, Tensor):
        return _held(own, name)
    return None if own is CLEAN else constant(own)


def _held(found: object, name: str) -> Value:
    if isinstance(found, Tensor):
        return Value(labels=frozenset({"weights"}), tensor=True, owner=name, const=found)
    return constant(found)


def _of_config(config: PreTrainedConfig, name: str) -> Value | Property | None:
    """A config's fields have other names by `attribute_map`; reading one runs no model code."""
    try:
        found = getattr(config, name)
    except Exception:  # a property of the config may raise anything; then it is not known
        return None
    return Value(const=found)


def _own(obj: object) -> Mapping[str, Any]:
    try:
        return vars(obj)
    except TypeError:
        return {}


def _of_class(obj: object, name: str) -> Value | Property | None:
    kind = obj if isinstance(obj, type) else type(obj)
    for base in kind.__mro__:
        if name in vars(base):
            return _bind(vars(base)[name], Value(const=obj), is_class=isinstance(obj, type))
    return None


def _bind(found: Any, receiver: Value, *, is_class: bool) -> Value | Property | None:
    if isinstance(found, staticmethod):
        return constant(found.__func__)
    if isinstance(found, classmethod):
        owner = receiver.const if is_class else type(receiver.const)
        return constant(Bound(found.__func__, Value(const=owner)))
    if isinstance(found, property):
        return Property(found.fget)
    if isinstance(getattr(found, "func", None), types.FunctionType) and hasattr(found, "attrname"):
        return Property(found.func)  # functools.cached_property
    if is_class or not callable(found):
        return None if _is_slot(found) else constant(found)
    if isinstance(found, type):
        return constant(found)
    return constant(Bound(found, receiver))


def _is_descriptor(found: object) -> bool:
    return isinstance(found, staticmethod | classmethod | property)


def _is_slot(found: object) -> bool:
    return isinstance(found, types.MemberDescriptorType | types.GetSetDescriptorType)
