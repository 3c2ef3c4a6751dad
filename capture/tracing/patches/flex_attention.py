"""Flex attention by its definition: score_mod and mask_mod under vmap, then a softmax.

torch compiles its operator where it is called, which leaves no operators to trace or to follow; a
run that a dispatch mode watches even breaks later calls in the same process.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from enginecast.capture.python.recompile import replaced
from enginecast.library_names import private

_MODULE = "torch.nn.attention.flex_attention"


@contextmanager
def flex_attention_spelled_out() -> Iterator[None]:
    """Within the block, `flex_attention` computes so: what torch's own kernel for CPUs does."""
    module = sys.modules.get(_MODULE)
    if module is None:
        yield
        return
    with (
        replaced(module, "flex_attention_hop", _defined),
        replaced(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        replaced(module, "setup_compilation_env", partial(nullcontext, "eager")),
    ):
        yield


def _defined(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    name = "torch._higher_order_ops.flex_attention.math_attention"
    found: tuple[Tensor, Tensor, Tensor] = private(name, "flex_attention")(*args)
    return found
