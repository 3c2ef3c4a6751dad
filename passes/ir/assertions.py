"""Run the assertions that a program holds; say in the user's terms which one fails."""

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from enginecast.errors import VerificationError
from enginecast.passes.ir.source import source_line


class AssertionFailedError(VerificationError):
    """An assertion of the program does not hold.

    Args:
        message: as for `VerificationError`.
        case: number of the case, among those that were run.
        hint: as for `VerificationError`.
    """

    def __init__(self, message: str, case: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.case = case


def run_number(node: Node, case: int, call: Callable[[], Any]) -> Any:
    """Compute a node; arithmetic on Python numbers may fail where a way of the model was not taken.

    Raises:
        AssertionFailedError: it divides by zero, or overflows.
    """
    try:
        return call()
    except ArithmeticError as error:
        place = source_line(node) or node.name
        raise AssertionFailedError(
            f"the program fails at {place}: {error}",
            case,
            hint="torch.export followed the way that does not fail; rewrite what is tried there.",
        ) from error


def run_check(node: Node, case: int, call: Callable[[], Any]) -> Any:
    """Call an assertion.

    Raises:
        AssertionFailedError: it does not hold, with the line of the model's code.
    """
    try:
        return call()
    except RuntimeError as error:
        place = source_line(node) or node.name
        said = next(iter(str(error).splitlines()), "")
        raise AssertionFailedError(
            f"the assertion at {place} does not hold: {said}",
            case,
            hint="Give inputs that it holds for: --inputs; or narrow the sizes: --dynamic.",
        ) from error
