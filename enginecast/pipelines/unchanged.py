"""Whether the parts of an attached component are still those that it was attached with.

An engine computes what was exported.  Hooks on a part, layers in the place of others (adapters),
and new weights change what eager computes, and would be lost without a word.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

_EAGER_ONLY = frozenset({"use_slicing", "gradient_checkpointing", "training"})
"""Settings that change how eager computes, or how it is trained, and not what an engine gives."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Snapshot:
    """A component as it was attached.

    Args:
        module: its parameters have no data.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._settings = _settings(module)
        every = dict(module.named_modules())
        # Offloading and recording hook the whole, which changes no part.
        self._parts = {path: vars(part) for path, part in every.items() if part is not module}
        self._layers = {
            path: vars(part)["_modules"] for path, part in every.items() if vars(part)["_modules"]
        }
        self._weights = {
            path: own["_parameters"] for path, own in self._parts.items() if own["_parameters"]
        }
        self._hooks = [own[kind] for own in self._parts.values() for kind in _HOOKS]
        self._before = self._state()
        self._found = self._by_path()

    def changed(self) -> str | None:
        """What is otherwise now: "conv_in has other hooks than"; None: nothing."""
        if self._state() != self._before:
            now = self._by_path()
            return next(what for what in now if now[what] != self._found.get(what))
        settings = _settings(self._module)
        if settings == self._settings:
            return None
        for name in dict.fromkeys((*self._settings, *settings)):
            if settings.get(name) != self._settings.get(name):
                return f"{name} is {settings.get(name)!r}, and was {self._settings.get(name)!r}"
        return None

    def _state(self) -> tuple[Any, ...]:
        """All at once.  It holds the objects, so that none of them can be another's successor."""
        weights = [*chain.from_iterable(map(dict.values, self._weights.values()))]
        return (
            _Same(chain.from_iterable(map(dict.values, self._layers.values()))),
            _Same(weights),
            [each._version for each in weights if each is not None],
            _Same(own.get("forward") for own in self._parts.values()),
            [*map(len, self._hooks)],
        )

    def _by_path(self) -> dict[str, Any]:
        """The same, by what there is to say of it."""
        found: dict[str, Any] = {}
        for path, layers in self._layers.items():
            found[f"{path or 'it'} has other layers than"] = _Same(layers.values())
        for path, weights in self._weights.items():
            versions = [None if each is None else each._version for each in weights.values()]
            found[f"{path} has other weights than"] = _Same(weights.values()), versions
        for path, own in self._parts.items():
            found[f"{path} has another forward than"] = _Same([own.get("forward")])
            found[f"{path} has other hooks than"] = [len(own[kind]) for kind in _HOOKS]
        return found


class _Same:
    """Objects, equal to no others, whatever these say (tensors compare by element)."""

    def __init__(self, objects: Iterable[nn.Module | Tensor | Any]) -> None:
        self._objects = [*objects]
        self._ids = [*map(id, self._objects)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._ids == other._ids


def _settings(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of a component: flags and numbers that its methods read."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
        and not name.startswith("_")
        and name not in _EAGER_ONLY
    }
