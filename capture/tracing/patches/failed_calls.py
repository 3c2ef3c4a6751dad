"""A submodule that raises an error, which the model catches.

torch.fx keeps a stack of the modules that run, and does not take a module off it that raised.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import Tracer

from enginecast.capture.python.recompile import replaced


@contextmanager
def failed_calls_left() -> Iterator[None]:
    """Within the block, a call of a module that raises an error ends for the tracer as well."""
    plain = Tracer.call_module

    def called(self: Tracer, m: nn.Module, *args: Any) -> Any:
        depth = len(self.module_stack)
        try:
            return plain(self, m, *args)
        except BaseException:
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            raise

    with replaced(Tracer, "call_module", called):
        yield
