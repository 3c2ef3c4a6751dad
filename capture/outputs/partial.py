"""A model's output object with some fields missing: reading one of those raises a clear error."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn, SupportsIndex, overload

from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from enginecast.capture.outputs.flatten import HIDDEN_STATES
from enginecast.errors import UsageError

ALWAYS = ("last_hidden_state", "pooler_output", "text_embeds", "logits")
"""Fields that a model fills whenever its output has them."""
Refuse = Callable[[str, str], Exception]
"""Makes the error for a missing output from its name and the names of the available ones."""


class MissingOutput:
    """A placeholder for an output that is not available; any use raises an error.

    It keeps its position, so that the other outputs keep their indices.
    """

    def __init__(self, name: str, there: Iterable[str], refuse: Refuse) -> None:
        self._name = name
        self._there = ", ".join(there) or "none"
        self._refuse = refuse

    def refuse(self) -> Exception:
        return self._refuse(self._name, self._there)

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
        return f"MissingOutput({self._name!r})"


class HiddenStates(tuple[Tensor | MissingOutput, ...]):
    """All hidden states of a model; indexing one that is not available raises an error.

    Iterating yields a `MissingOutput` for each of those: code that moves or casts outputs, such as
    accelerate, rebuilds this tuple from what it iterates over.
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
            if isinstance(one, MissingOutput):
                raise one.refuse()
        return found


class UncountedHiddenStates(dict[int, Tensor]):
    """Hidden states of a model of which nobody knows how many it has: by index, as they came."""

    @staticmethod
    def refuse(name: str, there: str) -> Exception:
        """As a method, for what moves outputs makes another one of the items alone."""
        return UsageError(f"{name} is not available; available: {there}")

    def __missing__(self, index: int) -> NoReturn:
        there = (f"{HIDDEN_STATES}.{one}" for one in self.keys())
        raise MissingOutput(f"{HIDDEN_STATES}.{index}", there, self.refuse).refuse()

    def __iter__(self) -> NoReturn:
        raise self.refuse(HIDDEN_STATES, ", ".join(str(one) for one in self.keys()))


def assemble(
    kind: type[ModelOutput],
    tensors: Mapping[str, Tensor],
    count: int | None,
    refuse: Refuse,
    *,
    hidden: bool,
    always: Sequence[str] = ALWAYS,
    uncounted: type[UncountedHiddenStates] = UncountedHiddenStates,
) -> ModelOutput:
    """Put outputs into the fields of what a model of transformers returns.

    Args:
        tensors: by name; a hidden state is called `hidden_states.-2`.
        count: of the model's hidden states, where it is known.
        hidden: whether hidden states were asked for.
        always: fields that the model fills in any case, be they there or not.
        uncounted: holds hidden states where `count` is None.
    """
    made = kind()
    for field in fields(kind):
        if field.name in tensors:
            made[field.name] = tensors[field.name]
        elif field.name == HIDDEN_STATES and hidden:
            made[field.name] = _hidden_states(tensors, count, refuse, uncounted)
        elif field.name in always:
            made[field.name] = MissingOutput(field.name, tensors, refuse)
    return made


def _hidden_states(
    tensors: Mapping[str, Tensor],
    count: int | None,
    refuse: Refuse,
    uncounted: type[UncountedHiddenStates],
) -> HiddenStates | UncountedHiddenStates:
    prefix = f"{HIDDEN_STATES}."
    there = [name for name in tensors if name.startswith(prefix)]
    found = {int(name.removeprefix(prefix)): tensors[name] for name in there}
    if count is None:
        return uncounted(found)
    counted = {index % count: tensor for index, tensor in found.items()}
    return HiddenStates(
        counted.get(index, MissingOutput(f"{prefix}{index}", there, refuse))
        for index in range(count)
    )
