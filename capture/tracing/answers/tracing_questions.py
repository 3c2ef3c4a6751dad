"""Answer code that asks whether it is being traced as eager would."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from enginecast.capture.python.locations import is_model_code, is_user_code
from enginecast.capture.python.recompile import replaced

QUESTIONS = ("is_exporting", "is_compiling", "is_dynamo_compiling")
"""Functions of `torch.compiler` that answer otherwise in a trace."""


@contextmanager
def answering_users(_: nn.Module) -> Iterator[None]:
    """Answer the user's own code that nothing is traced."""
    with _answering(is_user_code):
        yield


@contextmanager
def answering_all(_: nn.Module) -> Iterator[None]:
    """Answer libraries as well, but for torch itself: a mask that a library makes in a trace alone
    may be one that the model's code does not take.
    """
    with _answering(is_model_code):
        yield


@contextmanager
def _answering(is_told: Callable[[str], bool]) -> Iterator[None]:
    def answered(plain: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: not is_told(sys._getframe(1).f_code.co_filename) and plain()

    with ExitStack() as stack:
        for question in QUESTIONS:
            plain = getattr(torch.compiler, question)
            stack.enter_context(replaced(torch.compiler, question, answered(plain)))
        yield
