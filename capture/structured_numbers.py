"""What rewritten code calls instead of `range`, `int`, `float`, `bool`, `and`, `or` and `not`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from enginecast.capture.structured_loops import Count
from enginecast.capture.structured_values import as_predicate, is_open, truth


def range_(*bounds: Any) -> Any:
    """`range(*bounds)`, or what stands for it where a bound is data or a dynamic size."""
    bounds = tuple(int_(bound) if isinstance(bound, Tensor) else bound for bound in bounds)
    if not any(isinstance(bound, SymInt) for bound in bounds):
        return range(*bounds)
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not isinstance(step, int) or isinstance(step, SymInt) or step < 1:
        return range(*bounds)
    return Count(start, (stop - start + step - 1) // step if step > 1 else stop - start, step)


def int_(value: Any = 0, *rest: Any) -> Any:
    """`int(value)`; a number that is read from a tensor remains symbolic."""
    if isinstance(value, Tensor) and is_open(value):
        value = value.reshape(()) if value.dim() else value
        return (value.trunc() if value.is_floating_point() else value).to(torch.int64).item()
    return value if isinstance(value, SymInt) else int(value, *rest)


def float_(value: Any = 0.0) -> Any:
    """`float(value)`; of an open tensor, the tensor itself in a floating dtype."""
    if isinstance(value, Tensor) and is_open(value):
        value = value.reshape(()) if value.dim() else value
        return value if value.is_floating_point() else value.to(torch.get_default_dtype())
    return value if isinstance(value, SymFloat) else float(value)


def bool_(value: Any = False) -> Any:
    """`bool(value)`; of an open value, a boolean tensor."""
    return as_predicate(value) if is_open(value) else bool(value)


def item(value: Any) -> Any:
    """`value.item()` in a predicate; of an open tensor, the tensor itself."""
    if isinstance(value, Tensor) and is_open(value):
        return value.reshape(()) if value.dim() else value
    return value.item()


def not_(value: Any) -> Any:
    """`not value`."""
    if not is_open(value):
        return not value
    value = truth(value)
    return torch.logical_not(value) if isinstance(value, Tensor) else torch.sym_not(value)


def and_(first: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    """`first() and ...`; what comes after an open value is computed in any case."""
    value = first()
    for further in rest:
        if is_open(value):
            value = _both(value, further(), torch.logical_and)
        elif not value:
            return value
        else:
            value = further()
    return value


def or_(first: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    """`first() or ...`; what comes after an open value is computed in any case."""
    value = first()
    for further in rest:
        if is_open(value):
            value = _both(value, further(), torch.logical_or)
        elif value:
            return value
        else:
            value = further()
    return value


def _both(one: Any, other: Any, combine: Callable[[Tensor, Tensor], Tensor]) -> Any:
    one, other = truth(one), truth(other)
    if isinstance(one, SymBool) and isinstance(other, SymBool):
        return one & other if combine is torch.logical_and else one | other
    return combine(as_predicate(one), as_predicate(other))
