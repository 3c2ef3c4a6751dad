"""Track which mask the indices in a tensor come from: a loop over them becomes a loop over all
positions.

The rows of `mask.nonzero()` are as many as the mask has true elements, and an index in a round of
a loop over them is data.  Where the mask has a known size, the loop is as well one over all its
places, each with a branch: a mixture of experts goes through the experts that were hit in this way.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from enginecast.capture.python.tensor_facts import TensorFacts
from enginecast.library_names import private

MOST_PLACES = 256
"""Most elements of a mask for which a loop over all positions is made."""
_SELECTING = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)


class _Selections(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._masks = TensorFacts[tuple[Tensor, int]]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.item and isinstance(args[0].storage_offset(), SymInt):
            # torch cannot read a number in a block where the row of a round begins.
            return args[0].clone().item()
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor):
            constant = args[0].constant  # names a layer in code such as self[f"expert_{index}"]
            if constant is not None:
                number: Any = constant.item()
                return format(number, args[1])
        found = func(*args, **kwargs)
        if func in _SELECTING and isinstance(found, Tensor) and args[0].dim() == 1:
            self._masks.note(found, (args[0], args[0]._version))
        return found

    def mask_of(self, places: Tensor) -> Tensor | None:
        mask, version = self._masks.of(places) or (None, 0)
        # Written to since, it may have other places.
        return mask if mask is not None and mask._version == version else None


@contextmanager
def noting_selections() -> Iterator[None]:
    """Within the block, track which mask computed indices come from."""
    with _Selections():
        yield


def selected(places: Tensor) -> tuple[Tensor, int] | None:
    """The mask whose true elements are `places`, one per row, and its size; None if unknown."""
    for mode in private("torch.overrides._get_current_function_mode_stack", "x[mask]")():
        mask = mode.mask_of(places) if isinstance(mode, _Selections) else None
        if mask is not None and isinstance(mask.shape[0], int) and mask.shape[0] <= MOST_PLACES:
            return mask, mask.shape[0]
    return None
