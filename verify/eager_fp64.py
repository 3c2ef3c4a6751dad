"""The fp64 reference of a model that has no program: the model itself, computing in fp64.

`module.double()` is not enough: forward may say `.float()` or `dtype=torch.float32`, as norms and
rotary embeddings do.  So every operator that is asked for fp32 is given fp64.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from enginecast.errors import VerificationError
from enginecast.verify.floor import Case, Eager, Forward, Outputs, eager_outputs


class _Widening(TorchDispatchMode):
    """Hands fp64 to every operator that asks for fp32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_wider, (args, kwargs or {}))
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_fp64() -> Iterator[None]:
    """Compute in fp64 whatever dtype the code asks for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def fp64_outputs(eager: Eager, cases: Sequence[Case], forward: Forward) -> tuple[Outputs, str]:
    """The model's outputs in fp64; where it does not run in fp64, those in fp32.

    Those are a stricter measure: eager fp32 has no error by them, and an engine may have three unit
    roundoffs.

    Args:
        eager: makes the eager module in a dtype.
        cases: the verification inputs.
        forward: runs a module and names its outputs.

    Returns:
        The outputs, and a note on why they are fp32; empty when they are fp64.
    """

    def widened(dtype: torch.dtype) -> nn.Module:
        return eager(dtype).to(dtype)  # some keep buffers in fp32

    def forward_fp64(module: nn.Module, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with in_fp64():
            return forward(module, inputs)

    try:
        return eager_outputs(widened, cases, dtype="fp64", forward=forward_fp64), ""
    except VerificationError as error:
        plain = eager_outputs(eager, cases, dtype="fp32", forward=forward)
        return (
            plain,
            f"the reference is eager fp32: the model does not run in fp64: {error.message}",
        )
