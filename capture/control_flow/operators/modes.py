"""What is active while a subgraph is traced."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree


class _Constants(TorchFunctionMode):
    """Makes tensors from Python values by operators: a subgraph with constants of its own does not
    survive `run_decompositions`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.__setitem__ and isinstance(args[2], bool | int | float):
            value = torch.full((), args[2], dtype=args[0].dtype, device=args[0].device)
            args = (*args[:2], value)
        elif func in (torch.tensor, torch.as_tensor) and _is_small(args[0]):
            return _filled(args[0], kwargs.get("dtype"), kwargs.get("device"))
        return func(*args, **kwargs)


def _is_small(data: Any) -> bool:
    leaves = pytree.tree_leaves(data)
    return 0 < len(leaves) <= 64 and all(isinstance(leaf, bool | int | float) for leaf in leaves)


def _filled(data: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    if isinstance(data, list | tuple):
        dtype = dtype or _dtype_of(data)
        return torch.stack([_filled(part, dtype, device) for part in data])
    return torch.full((), data, dtype=dtype or _dtype_of(data), device=device)


def _dtype_of(data: Any) -> torch.dtype:
    kinds = {type(leaf) for leaf in pytree.tree_leaves(data)}
    if float in kinds:
        return torch.get_default_dtype()
    return torch.int64 if int in kinds else torch.bool


def with_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run with the function modes of now: inside an operator they are not active.

    torch.export understands `x[i]` with a symbolic `i` through such a mode.
    """
    modes = _get_current_function_mode_stack()

    def run(*arguments: Any) -> Any:
        active = {type(mode) for mode in _get_current_function_mode_stack()}
        with ExitStack() as stack:
            for mode in (*modes, _Constants()):
                if type(mode) not in active:
                    stack.enter_context(mode)
            return function(*arguments)

    return run
