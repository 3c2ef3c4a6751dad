"""Whether the parts of an attached component are still those that it was attached with.

An engine computes what was exported.  Hooks on a part, layers in the place of others (adapters),
and new weights change what eager computes, and would be lost without a word.
"""

from itertools import chain
from typing import Any

from torch import nn

from enginecast.pipelines.tiles import SETTINGS, works_by_tiles

_EAGER_ONLY = ("use_slicing", "gradient_checkpointing", "training")
"""Settings that change how eager computes, or how it is trained, and not what an engine gives."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Snapshot:
    """A component as it was attached.

    Args:
        module: its parameters have no data.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = [(path, vars(part)) for path, part in module.named_modules()]
        self._settings = self._plain_settings()
        # Held, so that none of them can be another's successor under the same id.
        self._held = [
            [*own["_modules"].values(), *own["_parameters"].values(), own.get("forward")]
            for _, own in self._parts
        ]
        every = [own for _, own in self._parts]
        self._dicts = [own["_modules"] for own in every if own["_modules"]]
        self._weights = [own["_parameters"] for own in every[1:] if own["_parameters"]]
        self._hooks = [own[kind] for own in every[1:] for kind in _HOOKS]
        self._before, self._quick = self._by_part(), self._all_at_once()

    def changed(self) -> str | None:
        """What is otherwise now: "conv_in has other hooks than"; None: nothing."""
        if self._all_at_once() != self._quick:
            pairs = zip(self._parts, self._before, self._by_part(), strict=True)
            path, was, found = next((p, a, b) for (p, _), a, b in pairs if a != b)
            words = ("other layers", "other weights", "another forward", "other hooks")
            what = next(w for w, a, b in zip(words, was, found, strict=True) if a != b)
            return f"{path or 'it'} has {what} than"
        settings = self._plain_settings()
        for name in dict.fromkeys((*self._settings, *settings)):
            if settings.get(name) != self._settings.get(name):
                return f"{name} is {settings.get(name)!r}, and was {self._settings.get(name)!r}"
        return None

    def _all_at_once(self) -> list[Any]:
        """What `_by_part` looks at; every call of an engine waits for it."""
        weights = [*chain.from_iterable(map(dict.values, self._weights))]
        return [
            *map(id, chain.from_iterable(map(dict.values, self._dicts))),
            *((id(each), each._version) for each in weights if each is not None),
            *(id(own.get("forward")) for _, own in self._parts[1:]),
            *map(len, self._hooks),
        ]

    def _by_part(self) -> list[tuple[Any, ...]]:
        """Of each part what its layers, weights, forward and hooks are."""
        found: list[tuple[Any, ...]] = []
        for path, own in self._parts:
            layers = [*map(id, own["_modules"].values())]
            if not path:  # offloading and recording hook the whole, which changes no part
                found.append((layers, None, None, None))
                continue
            weights = [(id(w), w._version) for w in own["_parameters"].values() if w is not None]
            hooks = [len(own[kind]) for kind in _HOOKS]
            found.append((layers, weights, id(own.get("forward")), hooks))
        return found

    def _plain_settings(self) -> dict[str, Any]:
        """Plain attributes of the component: flags and numbers that its methods read."""
        free = (*_EAGER_ONLY, *(SETTINGS if works_by_tiles(self._module) else ()), "_")
        return {
            name: value
            for name, value in vars(self._module).items()
            if isinstance(value, (bool, int, float, str)) and not name.startswith(free)
        }
