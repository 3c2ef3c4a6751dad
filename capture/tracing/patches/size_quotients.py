"""Round quotients of sizes by integer division: `math.ceil(n / 4)` as `-(-n // 4)`.

torch knows little of the ceiling of a quotient of floats; for sizes both are the same number.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import SymFloat, SymInt
from torch.fx.experimental.symbolic_shapes import statically_known_true

from enginecast.capture.python.recompile import replaced

_QUOTIENT = "_enginecast_quotient"
_ROUNDED: dict[str, Callable[[Any, int], Any]] = {
    "__ceil__": lambda size, by: -(-size // by),
    "__floor__": lambda size, by: size // by,
    "__trunc__": lambda size, by: size // by,
}


@contextmanager
def whole_quotients() -> Iterator[None]:
    """Within the block, remember of a quotient which size was divided by what."""
    plain: Callable[[Any, Any], Any] = SymInt.__truediv__

    def divided(size: Any, by: Any) -> Any:
        found = plain(size, by)
        if type(by) is int and by > 0 and isinstance(found, SymFloat):
            setattr(found, _QUOTIENT, (size, by))
        return found

    with ExitStack() as stack:
        stack.enter_context(replaced(SymInt, "__truediv__", divided))
        for name, rounded in _ROUNDED.items():
            stack.enter_context(replaced(SymFloat, name, _rounding(name, rounded)))
        yield


def _rounding(name: str, rounded: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
    plain = getattr(SymFloat, name)

    def run(number: Any) -> Any:
        size, by = getattr(number, _QUOTIENT, (None, 0))
        if size is not None and statically_known_true(size >= 0):
            return rounded(size, by)
        return plain(number)

    return run
