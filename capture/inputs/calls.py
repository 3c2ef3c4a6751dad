"""Map named tensors to the arguments of a model's method: nested arguments, and constants.

Engines take tensors by name.  A model may take them in dicts, lists, tuples and dataclasses, beside
numbers: `added_cond_kwargs={"text_embeds": t}` is the input `added_cond_kwargs_text_embeds`, and
`height=64` is part of the engine.
"""

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.errors import SourceError

CONSTANT = (bool, int, float, str, type(None))
"""What may stand beside tensors; it is the same in every call of an engine."""


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a method's arguments."""

    name: str


@dataclass(frozen=True)
class Fixed:
    """A tensor that is the same in every call, made anew for each: code that reads its values finds
    none that depend on an input.
    """

    values: Any
    """Nested tuples of numbers."""
    dtype: torch.dtype = torch.int64

    @classmethod
    def of(cls, tensor: Tensor) -> "Fixed":
        return cls(_tuples(tensor.tolist()), tensor.dtype)

    def tensor(self) -> Tensor:
        return torch.tensor(self.values, dtype=self.dtype)

    def __str__(self) -> str:
        return str(self.tensor().tolist())


@dataclass(frozen=True)
class Call:
    """A call of a model, without its tensors."""

    arguments: Mapping[str, Any]
    """By name; a `Slot` wherever a tensor goes."""
    entry: str = "forward"
    """The method that is called."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        found = (leaf for _, leaf in _leaves(self.arguments))
        return tuple(leaf.name for leaf in found if isinstance(leaf, Slot))

    @property
    def constants(self) -> dict[str, Any]:
        """The arguments that are neither tensors nor None, by name."""
        return {
            name: value
            for name, value in self.arguments.items()
            if all(not isinstance(leaf, Slot) for _, leaf in _leaves(value))
            and any(leaf is not None for _, leaf in _leaves(value))
        }

    @property
    def fixed(self) -> dict[str, Fixed]:
        """The tensors that are the same in every call, by argument."""
        return {n: value for n, value in self.arguments.items() if isinstance(value, Fixed)}

    @property
    def is_plain(self) -> bool:
        """Whether each argument is a tensor of the same name, of `forward`."""
        slots = (isinstance(v, Slot) and v.name == n for n, v in self.arguments.items())
        return self.entry == "forward" and all(slots)

    @property
    def signature(self) -> inspect.Signature:
        """Of a function that takes the tensors alone."""
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature([inspect.Parameter(name, kind) for name in self.inputs])

    def filled(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The arguments, with tensors in their places."""

        def filled(_: tuple[str, ...], leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return tensors[leaf.name]
            return leaf.tensor() if isinstance(leaf, Fixed) else leaf

        return {name: _mapped(value, filled) for name, value in self.arguments.items()}


OF_CACHES = (
    "--kv-cache exports a language model with a cache of keys and values; for any other"
    " cache, take its tensors as a list, and make the cache of them in forward."
)


def call_of(arguments: Mapping[str, Any], owner: str) -> tuple[Call, dict[str, Tensor]]:
    """Take the tensors out of the arguments of a call; see `left_out`.

    Raises:
        SourceError: something is neither a tensor, a number nor a container of them, or two tensors
            would have one name.
    """
    given = {name: value for name, value in arguments.items() if not left_out(value)}
    tensors: dict[str, Tensor] = {}
    for path, leaf in _leaves(given):
        if isinstance(leaf, Tensor):
            name = "_".join(path)
            if name in tensors:
                raise SourceError(
                    f"{owner}: two tensors of the example map to the input {name!r}, one of"
                    f" them {'.'.join(path)}",
                    hint="Rename an argument or a key.",
                )
            tensors[name] = leaf
        elif not isinstance(leaf, CONSTANT):
            kind = type(leaf).__name__
            is_cache = kind.endswith("Cache")
            raise SourceError(
                f"{owner}: the example's {'.'.join(path)} is a {kind}, expected"
                " tensors and numbers, in dicts, lists, tuples and dataclasses",
                hint=OF_CACHES if is_cache else "Bind other arguments in a module around this one.",
            )
    if given and not tensors:
        name, value = next(iter(given.items()))
        raise SourceError(
            f"{owner}: the example's {name} is a {type(value).__name__}, expected a tensor"
        )

    def slotted(path: tuple[str, ...], leaf: Any) -> Any:
        return Slot("_".join(path)) if isinstance(leaf, Tensor) else leaf

    return Call({name: _mapped(value, slotted, (name,)) for name, value in given.items()}), tensors


def left_out(value: Any) -> bool:
    """Whether an argument can be ignored: None, or a generator (engines draw no numbers)."""
    drawn = (isinstance(leaf, torch.Generator) for _, leaf in _leaves(value))
    return value is None or any(drawn)


def leaves_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What is not a container, by path, without None; as text what JSON has no number for."""
    given = {name: value for name, value in arguments.items() if not left_out(value)}

    def written(leaf: Any) -> Any:
        is_infinite = isinstance(leaf, float) and not math.isfinite(leaf)
        return str(leaf) if is_infinite or isinstance(leaf, Fixed) else leaf

    return {".".join(path): written(leaf) for path, leaf in _leaves(given) if leaf is not None}


def call_of_names(paths: Sequence[str], constants: Mapping[str, Any], entry: str) -> Call:
    """A call that takes a tensor at each path, such as `added_cond_kwargs.text_embeds`; constants
    are by path, too.
    """
    arguments: dict[str, Any] = {}
    slots = ((path, Slot(path.replace(".", "_"))) for path in paths)
    for path, leaf in (*constants.items(), *slots):
        *outer, last = path.split(".")
        place = arguments
        for key in outer:
            place[key] = place = dict(place.get(key, {}))
        place[last] = leaf
    return Call({name: _as_tuple(value) for name, value in arguments.items()}, entry)


def take_named_tensors(module: nn.Module, call: Call | None) -> nn.Module:
    """Make `module` take the tensors of `call` by name, in place.

    Wrapping the module instead would put a prefix before every module path in the program.
    """
    if call is None:
        return module
    bound, names = call, set(call.inputs)
    plain = getattr(type(module), bound.entry)

    def forward(*args: Any, **tensors: Any) -> Any:
        if args or tensors.keys() != names:
            return type(module).forward(module, *args, **tensors)  # the model's own code calls it
        returned = plain(module, **bound.filled(tensors))
        latent = getattr(returned, "latent_dist", None)  # an object, made of one tensor
        return returned if latent is None else {"moments": latent.parameters}

    forward.__signature__ = bound.signature  # type: ignore[attr-defined]
    forward.__wrapped__ = plain  # type: ignore[attr-defined]
    module.forward = forward
    return module


def with_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of a call's arguments with other tensors."""
    return _mapped(value, lambda _, leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def _mapped(
    value: Any, change: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()
) -> Any:
    """The same containers, with other leaves; `change` gets the path of each."""
    items = items_of(value)
    if items is None:
        return change(path, value)
    return _rebuilt(value, [_mapped(item, change, (*path, key)) for key, item in items.items()])


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    items = items_of(value)
    if items is None:
        yield path, value
        return
    for key, item in items.items():
        yield from _leaves(item, (*path, key))


def items_of(value: Any) -> dict[str, Any] | None:
    """What a container holds, by name; None for anything else."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Slot, Fixed)):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return {str(index): item for index, item in enumerate(value)}
    return None


def _rebuilt(value: Any, items: Sequence[Any]) -> Any:
    """A container of the same kind that holds other items, in the same order."""
    if isinstance(value, Mapping):
        return dict(zip(value, items, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)  # its constructor may want other arguments, or tensors
        for field, item in zip(dataclasses.fields(value), items, strict=True):
            object.__setattr__(made, field.name, item)
        return made
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _as_tuple(value: Any) -> Any:
    """A dict with the keys 0, 1, ... is a tuple, at any depth."""
    if not isinstance(value, dict):
        return value
    found = {key: _as_tuple(item) for key, item in value.items()}
    is_numbered = bool(found) and [*found] == [str(n) for n in range(len(found))]
    return tuple(found.values()) if is_numbered else found
