"""What is known of tensors while code runs, and what torch's functions do with values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

Fact = TypeVar("Fact")

_FUNCTIONS = (
    "add sub rsub mul div neg abs eq ne lt le gt ge logical_not logical_and logical_or masked_fill"
    " where to float bool long int half double type clone contiguous detach clamp minimum maximum"
    " bitwise_not bitwise_and bitwise_or"
)
_OPERATORS = "add radd sub rsub mul rmul truediv neg eq ne lt le gt ge invert and or"
ELEMENTWISE = frozenset((*_FUNCTIONS.split(), *(f"__{name}__" for name in _OPERATORS.split())))
_MOVES = (
    "__getitem__ unsqueeze squeeze expand expand_as view reshape flatten transpose permute repeat"
    " select narrow"
)
MOVES = frozenset(_MOVES.split())
"""Give elements of their first argument, at other places."""
REDUCES: Mapping[str, bool] = {"any": False, "all": True}
"""By name: the value that all elements have to have for the result to be that value."""


def storage(tensor: Tensor) -> int:
    """A key that tensors sharing memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes into, as its schema says."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


class TensorFacts(Generic[Fact]):
    """What is known of tensors, each until something is written into its memory.

    They are told apart by identity; each is kept, so that no other gets its id.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Fact]] = {}

    def note(self, tensor: Tensor, fact: Fact) -> None:
        """Remember of a tensor what it holds now; not of one that counts no writes."""
        if not tensor.is_inference():
            self._known[id(tensor)] = tensor, tensor._version, fact

    def of(self, value: object) -> Fact | None:
        """What is known of a tensor; None of one that was written to since."""
        tensor, version, fact = self._known.get(id(value), (None, 0, None))
        return fact if tensor is not None and tensor._version == version else None

    def __contains__(self, value: object) -> bool:
        """Whether something was noted of a tensor, be it true still or not."""
        return id(value) in self._known
