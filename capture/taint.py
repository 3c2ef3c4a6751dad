"""What is known of a Python value without running anything: the domain of the scan.

A `Value` says what a value depends on (`labels`), whether it is a tensor, whether Python read it
out of one, and, where that is known, which object it is.
"""

import types
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.findings import DECIDES, Decides


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = _Unknown()
"""No object is known."""
NOTHING: frozenset[str] = frozenset()
MAPPINGS = (dict, weakref.WeakKeyDictionary, types.MappingProxyType)
PLAIN = (int, float, str, bool, bytes, complex, type(None), type(Ellipsis))


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of one value."""

    labels: frozenset[str] = NOTHING
    """What it depends on: "inputs", "weights", "shapes", "dtypes", "state"."""
    tensor: bool = False
    """It is a tensor, or holds some."""
    read: bool = False
    """A Python value that was read out of a tensor's values."""
    sized: bool = False
    """A tensor whose sizes depend on values, as those of nonzero do."""
    mask: bool = False
    """A tensor of booleans."""
    optional: bool = False
    """It may be None instead."""
    vague: bool = False
    """An unknown function made it, so it may as well be no tensor: it is not said to decide."""
    many: bool = False
    """A container, of which the elements are not known one by one."""
    owner: str = ""
    """The buffer or parameter whose memory it shares."""
    const: Any = UNKNOWN
    """The object itself."""
    items: tuple["Value", ...] | None = None
    """Elements of a tuple or list."""
    fields: Mapping[str, "Value"] | None = None
    """Values of a dict by string key, or attributes of an object that the code made."""
    count: "Value | None" = None
    """What decides how many elements a container has."""
    each: "Value | None" = None
    """An element of a container of many, where more is known of it than of the container."""

    @property
    def is_known(self) -> bool:
        return self.const is not UNKNOWN

    @property
    def is_one_tensor(self) -> bool:
        """Surely a tensor: no container, and not perhaps None."""
        is_container = self.many or self.items is not None or self.fields is not None
        return self.tensor and not is_container and not self.optional and not self.vague

    @property
    def is_data(self) -> bool:
        """Whether a predicate on it needs the values of a tensor."""
        is_container = self.many or self.items is not None or self.fields is not None
        return not self.vague and (self.read or (self.tensor and not is_container))

    @property
    def decides(self) -> Decides:
        found: list[Decides] = [label for label in DECIDES if label in self.labels]  # type: ignore[misc]
        if not found:
            return "weights" if self.is_data else "unknown"  # a constant
        return found[0]


CLEAN = Value()


def constant(value: object) -> Value:
    """An object that is there before the model runs."""
    if isinstance(value, Tensor):
        return Value(labels=frozenset({"weights"}), tensor=True, const=value)
    return Value(const=value)


def sequence(items: Iterable[Value]) -> Value:
    return Value(items=tuple(items))


def is_plain(value: Value) -> bool:
    return isinstance(value.const, PLAIN)


def parts(value: Value) -> Iterable[Value]:
    """The value, and all that it holds."""
    yield value
    for part in (*(value.items or ()), *(value.fields or {}).values()):
        yield from parts(part)


def mix(values: Iterable[Value]) -> Value:
    """What an unknown function makes of values: it depends on all of them."""
    flat = [part for value in values for part in parts(value)]
    data = [part for part in flat if part.tensor or part.read or part.vague]
    return Value(
        labels=NOTHING.union(*(each.labels for each in flat)),
        tensor=any(each.tensor for each in flat),
        read=any(each.read for each in flat),
        sized=any(each.sized and not each.vague for each in flat),
        vague=bool(data) and all(each.vague for each in data),
    )


def guess(values: Iterable[Value]) -> Value:
    """What a function gives of which nothing is known."""
    made = mix(values)
    return replace(made, vague=made.tensor or made.read or made.vague)


def scalar(values: Iterable[Value]) -> Value:
    """A Python value computed from values, none of which is read as a tensor."""
    made = mix(values)
    return replace(made, tensor=False, sized=False)


def tensor_from(values: Iterable[Value]) -> Value:
    """What an operator gives for values."""
    made = mix(values)
    return replace(made, labels=made.labels - {"dtypes"}, tensor=True, read=False)


def as_state(value: Value | None) -> Value:
    """An attribute that the module's own forward writes: it may hold anything of its kind."""
    found = CLEAN if value is None else value
    is_container = isinstance(found.const, (list, set, *MAPPINGS))
    labels = found.labels | {"state"}
    count = Value(labels=labels) if is_container else None
    return replace(found, labels=labels, const=UNKNOWN, many=is_container, owner="", count=count)


def shape_of(value: Value) -> Value:
    """Sizes of a tensor."""
    if isinstance(value.const, Tensor):
        return Value(const=tuple(value.const.shape))
    if value.sized:
        return Value(labels=value.labels | {"shapes"}, read=True)
    is_fixed = value.labels == {"weights"}
    return CLEAN if is_fixed else Value(labels=frozenset({"shapes"}))


def truth(value: Value) -> bool | None:
    """What `if value` does, where it is known."""
    if value.items is not None:
        return bool(value.items)
    if not value.is_known or isinstance(value.const, Tensor):
        return None
    if isinstance(value.const, (*PLAIN, tuple, list, dict, set, frozenset, range)):
        return bool(value.const)
    if isinstance(value.const, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return len(value.const) > 0
    has_own = any(hasattr(type(value.const), name) for name in ("__bool__", "__len__"))
    return None if has_own else True


def element(value: Value) -> Value:
    """An element of a container or tensor."""
    if value.items is not None:
        joined = CLEAN
        for index, item in enumerate(value.items):
            joined = item if index == 0 else join(joined, item)
        return joined
    if value.each is not None:
        return value.each
    return replace(value, const=UNKNOWN, many=False, count=None, fields=None, optional=False)


def join(left: Value, right: Value) -> Value:
    """What is known of a value that is one of two."""
    if left is right or key(left) == key(right):
        return left
    if left.items is not None and right.items is not None and len(left.items) == len(right.items):
        return sequence(map(join, left.items, right.items))
    if left.fields is not None and right.fields is not None:
        return replace(_blur(left, right), fields=_joined_fields(left.fields, right.fields))
    is_optional = left.const is None or right.const is None or left.optional or right.optional
    if left.const is None or right.const is None:
        other = right if left.const is None else left
        return replace(other, const=UNKNOWN, optional=True)
    return replace(_blur(left, right), optional=is_optional)


def _blur(left: Value, right: Value) -> Value:
    is_container = any(v.many or v.items is not None for v in (left, right))
    counts = [v.count for v in (left, right) if v.count is not None]
    return replace(
        mix((left, right)),
        mask=left.mask and right.mask,
        many=is_container,
        owner=left.owner or right.owner,
        count=mix(counts) if counts else None,
    )


def _joined_fields(left: Mapping[str, Value], right: Mapping[str, Value]) -> dict[str, Value]:
    absent = Value(const=None)
    return {
        name: join(left.get(name, absent), right.get(name, absent)) for name in {**left, **right}
    }


def key(value: Value) -> tuple[object, ...]:
    """Equal for values of which the same is known; holds ids, so the values must be kept."""
    items, fields = value.items, value.fields
    return (
        value.labels,
        (value.tensor, value.read, value.sized, value.mask),
        (value.optional, value.many, value.vague),
        value.owner,
        _const_key(value.const),
        None if items is None else tuple(map(key, items)),
        None if fields is None else tuple((name, key(field)) for name, field in fields.items()),
        None if value.count is None else key(value.count),
        None if value.each is None else key(value.each),
    )


def _const_key(const: Any) -> object:
    if isinstance(const, PLAIN):
        return (type(const), const)
    if isinstance(const, torch.dtype | torch.device):
        return const
    return id(const)


def depending(value: Value, test: Value) -> Value:
    """A value that is one of two, as `test` decides by data or state."""
    if value.tensor or test.vague or not (test.is_data or "state" in test.labels):
        return value
    read = value.read or test.is_data
    return replace(value, labels=value.labels | test.labels, read=read, const=UNKNOWN)
