"""Outputs in the form in which the encoder's own class returns them."""

import inspect
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn, SupportsIndex, overload

import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import modeling_outputs
from transformers.models.clip.modeling_clip import CLIPTextModelOutput
from transformers.utils import ModelOutput

from enginecast.cache.spec import About
from enginecast.errors import CacheError

HIDDEN = "hidden_states"
_ALWAYS = ("last_hidden_state", "pooler_output", "text_embeds", "logits")
"""Fields that a model fills whenever its output has them."""


class AbsentOutputError(CacheError, AttributeError):
    """An output that the cache does not hold was used.

    An AttributeError, too: accelerate and others ask by `hasattr` what an output is.
    """


class Absent:
    """Stands where the model returns an output that the cache does not hold; any use is an error.

    Its place counts: `[0]` has to stay what it is.
    """

    def __init__(self, name: str, there: Iterable[str]) -> None:
        self._name = name
        self._there = ", ".join(there) or "none"

    def refuse(self) -> AbsentOutputError:
        return AbsentOutputError(
            f"{self._name} is not in the cache; there is {self._there}",
            hint=f"Fill a cache with --outputs {self._name} besides what is needed.",
        )

    @property
    def ndim(self) -> int:
        """Pipelines look at it to tell what came first from what they want."""
        return 2 if self._name in ("pooler_output", "text_embeds") else 3

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying and printing look for
            raise AttributeError(name)
        raise self.refuse()

    def __getitem__(self, index: Any) -> Any:
        raise self.refuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        """Called in place of a function of torch (`torch.cat`, `+`) that is given one of these."""
        raise next(one for one in tree_leaves((given, named)) if isinstance(one, cls)).refuse()

    def __repr__(self) -> str:
        return f"Absent({self._name!r})"


class HiddenStates(tuple[Tensor | Absent, ...]):
    """All hidden states of a model; asked for one that is not in the cache, it says so.

    Going through them gives `Absent` for those: what moves or casts outputs (accelerate does) makes
    another of these from what it went through.
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...

    def __getitem__(self, index: Any) -> Any:
        try:
            found = super().__getitem__(index)
        except IndexError:
            raise IndexError(f"hidden_states[{index}]: the model has {len(self)}") from None
        for one in found if isinstance(index, slice) else (found,):
            if isinstance(one, Absent):
                raise one.refuse()
        return found


class UncountedHiddenStates(dict[int, Tensor]):
    """Hidden states of a model of which nobody knows how many it has: by index, as the fill did."""

    def __missing__(self, index: int) -> NoReturn:
        raise Absent(f"{HIDDEN}.{index}", (f"{HIDDEN}.{one}" for one in self.keys())).refuse()

    def __iter__(self) -> NoReturn:
        raise CacheError(
            f"{HIDDEN}: expected one index, as the cache does not know how many the model has",
            hint="Give the model's config.json beside the bundle when the cache is filled.",
        )


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
            values[field.name] = _hidden_states(tensors, count)
        elif field.name in _ALWAYS:
            values[field.name] = Absent(field.name, tensors)
    made = kind()
    for name, value in values.items():
        made[name] = value
    return made


def _hidden_states(
    tensors: Mapping[str, Tensor], count: int | None
) -> HiddenStates | UncountedHiddenStates:
    prefix = f"{HIDDEN}."
    there = [name for name in tensors if name.startswith(prefix)]
    found = {int(name.removeprefix(prefix)): tensors[name] for name in there}
    if count is None:
        return UncountedHiddenStates(found)
    counted = {index % count: tensor for index, tensor in found.items()}
    return HiddenStates(
        counted[index] if index in counted else Absent(f"{prefix}{index}", there)
        for index in range(count)
    )
