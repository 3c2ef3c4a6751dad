"""Outputs in the form in which the encoder's own class returns them."""

import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import transformers
from torch import Tensor
from transformers import modeling_outputs
from transformers.models.clip.modeling_clip import CLIPTextModelOutput
from transformers.utils import ModelOutput

from enginecast.cache.spec import About
from enginecast.errors import CacheError

HIDDEN = "hidden_states"
_ALWAYS = ("last_hidden_state", "pooler_output", "text_embeds", "logits")
"""Fields that a model fills whenever its output has them."""


class Absent:
    """Stands where the model returns an output that the cache does not hold; any use is an error.

    Its place counts: `[0]` has to stay what it is.
    """

    def __init__(self, name: str, reason: str) -> None:
        self._name = name
        self._reason = reason

    def _refuse(self) -> CacheError:
        return CacheError(
            f"{self._name}: {self._reason}",
            hint=f"Fill a cache with --outputs {self._name} besides what is needed.",
        )

    @property
    def ndim(self) -> int:
        """Pipelines look at it to tell what came first from what they want."""
        return 2 if self._name in ("pooler_output", "text_embeds") else 3

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and printing look for
            raise AttributeError(name)
        raise self._refuse()

    def __getitem__(self, index: Any) -> Any:
        raise self._refuse()

    def __repr__(self) -> str:
        return f"Absent({self._name!r})"


class HiddenStates(tuple[Tensor, ...]):
    """Hidden states of a model, of which some are there: asked for another, it says so.

    A tuple of those that are there, so that it passes for what the model returns.

    Args:
        found: by index as the model's tuple has it; all not negative where `count` is known.
        count: of all that the model gives; None: nobody knows.
    """

    _found: Mapping[int, Tensor]
    _count: int | None

    def __new__(cls, found: Mapping[int, Tensor], count: int | None) -> "HiddenStates":
        made = super().__new__(cls, tuple(found.values()))
        made._found = found
        made._count = count
        return made

    def __len__(self) -> int:
        return len(self._found) if self._count is None else self._count

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            raise CacheError(f"hidden_states: expected one index, got {index!r}")
        for same in self._same(index):
            if same in self._found:
                return self._found[same]
        there = ", ".join(str(one) for one in self._found) or "none"
        raise CacheError(
            f"hidden_states[{index}] is not in the cache; there is {there}",
            hint=f"Fill a cache with --outputs hidden_states.{index}.",
        )

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(len(self)):
            yield self[index]

    def _same(self, index: int) -> list[int]:
        if self._count is None:
            return [index]
        return [index, index - self._count] if index >= 0 else [index, index + self._count]


def output_class(about: About, names: Sequence[str]) -> type[ModelOutput]:
    """What the encoder's class says that its forward returns.

    Where the class is not known, or what it returns has no place for the outputs, they decide.

    Args:
        names: of the outputs that are there.
    """
    found = _declared(getattr(transformers, about.encoder, None))
    if found is not None and {name.partition(".")[0] for name in names} <= _names(found):
        return found
    made: type[ModelOutput] = modeling_outputs.BaseModelOutput
    if "text_embeds" in names:
        made = CLIPTextModelOutput
    elif "pooler_output" in names:
        made = modeling_outputs.BaseModelOutputWithPooling
    return made


def _names(kind: type[ModelOutput]) -> set[str]:
    return {field.name for field in fields(kind)}


def _declared(model: Any) -> type[ModelOutput] | None:
    if not inspect.isclass(model):
        return None
    returned = typing.get_type_hints(getattr(model, "forward", None)).get("return")
    for one in (returned, *typing.get_args(returned)):
        if inspect.isclass(one) and issubclass(one, ModelOutput):
            return one
    return None


def assemble(
    kind: type[ModelOutput], tensors: Mapping[str, Tensor], count: int | None, *, hidden: bool
) -> ModelOutput:
    """Put outputs into their fields.

    Args:
        tensors: by name: "last_hidden_state", "hidden_states.-2".
        count: of the model's hidden states; None: nobody knows.
        hidden: whether hidden states were asked for.
    """
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in tensors:
            values[field.name] = tensors[field.name]
        elif field.name == HIDDEN and hidden:
            values[field.name] = HiddenStates(_hidden(tensors), count)
        elif field.name in _ALWAYS:
            there = ", ".join(tensors)
            values[field.name] = Absent(field.name, f"it is not in the cache, which has {there}")
    made = kind()
    for name, value in values.items():
        made[name] = value
    return made


def _hidden(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    prefix = f"{HIDDEN}."
    return {
        int(name.removeprefix(prefix)): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
