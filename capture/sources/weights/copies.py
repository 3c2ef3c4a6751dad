"""Copy modules completely, including what `copy.deepcopy` refuses or shares with the original.

Tensors that were computed, as those of `torch.nn.utils.weight_norm`, are copied by value, and a
module whose own `__deepcopy__` may return another one by what it holds.
Functions that hold the module in their closure, as hooks do, hold the copy.
"""

import copy
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.python.locations import is_model_code
from enginecast.errors import CaptureError, first_line


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module; `memo` has what to put in the place of some of its tensors, by id."""
    for part in module.modules():
        for held in vars(part).values():
            if isinstance(held, Tensor) and not held.is_leaf:
                memo.setdefault(id(held), held.detach().clone())
    try:
        for part in filter(_copies_itself, reversed(list(module.modules()))):
            memo[id(part)] = plain = type(part).__new__(type(part))
            vars(plain).update(copy.deepcopy(vars(part), memo))
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # of whatever the module holds
        raise CaptureError(
            f"the module cannot be copied, which an export works on: {first_line(error)}",
            hint="Give a function that makes it, as MODULE:FUNCTION, or leave out of it what"
            " copy.deepcopy does not take.",
        ) from error
    for part in copied.modules():
        _restore_parameters(part)
        spaces: tuple[dict[Any, Any], ...] = (
            vars(part),
            part._forward_hooks,
            part._forward_pre_hooks,
        )
        for names in spaces:
            for name, held in list(names.items()):
                if isinstance(held, FunctionType) and held.__closure__:
                    names[name] = _rebound(held, memo)
    return copied


def _restore_parameters(copied: nn.Module) -> None:
    """Make parameters again of what the copy of a scripted module has as plain tensors."""
    parameters = copied._parameters if isinstance(copied, torch.jit.ScriptModule) else {}
    for name, tensor in parameters.items():
        if tensor is not None:
            copied._parameters[name] = nn.Parameter(tensor.detach(), requires_grad=False)


def _copies_itself(module: nn.Module) -> bool:
    """Whether the model's own code says what a copy is."""
    method = getattr(type(module), "__deepcopy__", None)
    code = getattr(method, "__code__", None)
    return code is not None and is_model_code(code.co_filename)


def _rebound(function: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    """The function, with copies in its closure of what was copied."""
    cells = tuple(_cell(cell, memo) for cell in function.__closure__ or ())
    if cells == function.__closure__:
        return function
    found = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    found.__kwdefaults__ = function.__kwdefaults__
    found.__dict__.update(function.__dict__)
    return found


def _cell(cell: CellType, memo: Mapping[int, Any]) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # not bound yet
        return cell
    return CellType(memo[id(content)]) if id(content) in memo else cell


def cast_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floats of a module, in place.

    Complex numbers stay: `Module.to` would take their imaginary part away.  So do the layers in
    fp64 of a model that has others, too: its code casts what goes into them.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    doubles = _layers_in_fp64(module)
    if not doubles or dtype == torch.float64:
        module._apply(cast)
        return module
    for part in set(module.modules()) - doubles:
        part._apply(cast, recurse=False)
    return module


def _layers_in_fp64(module: nn.Module) -> set[nn.Module]:
    """The layers with weights in fp64, of a model that has others as well."""
    found, others = set[nn.Module](), False
    for part in module.modules():
        weights = part.parameters(recurse=False)
        dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
        if dtypes == {torch.float64}:
            found.add(part)
        others |= bool(dtypes - {torch.float64})
    return found if others else set()
