"""TorchScript compiles what a decorator wraps, and leaves the decorator out without a word."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.jit import frontend

from enginecast.capture.refusal import is_user_code

PARSE = "parse_def"
"""What TorchScript's frontend reads a function's source with."""


@contextmanager
def refusing_decorators() -> Iterator[None]:
    """Within the block, scripting a function that a user's decorator wraps raises an error.

    Raises:
        RuntimeError: as TorchScript raises for what it does not take; names function and line.
    """
    plain: Callable[[Any], Any] = vars(frontend)[PARSE]

    def checked(function: Any) -> Any:
        _refuse(function)
        return plain(function)

    setattr(frontend, PARSE, checked)
    try:
        yield
    finally:
        setattr(frontend, PARSE, plain)


def _refuse(function: Any) -> None:
    while hasattr(function, "__wrapped__"):
        code = getattr(function, "__code__", None)
        if code is not None and is_user_code(code.co_filename):
            raise RuntimeError(
                f"TorchScript would leave out the decorator of {function.__qualname__}, which is "
                f"at {code.co_filename}:{code.co_firstlineno}"
            )
        function = function.__wrapped__
