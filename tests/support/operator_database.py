"""torch's operator database as test cases: each operator with a few of its own sample inputs."""

import sys
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# The database is part of torch's test tools, which want this package for a base class alone.
sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

OPERATORS = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}

FLOATS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "as given": lambda v: v,
    "zeros": torch.zeros_like,
    "negative zero": lambda v: -torch.zeros_like(v),
    "tiny": lambda v: v * 1e-4,
    "large": lambda v: v * 1e3,
    "shifted": lambda v: v + 100,
    "whole": lambda v: v.round(),
    "halves": lambda v: (v * 3).round() / 2,
}
INTEGERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "as given": lambda v: v,
    "zeros": torch.zeros_like,
    "negated": lambda v: -v,
    "large": lambda v: v * 3037000501,
}


@dataclass(frozen=True)
class Sample:
    """A module that calls an operator on tensors."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    said: str

    def on(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The inputs, those of a dtype changed."""
        return tuple(change(x) if x.dtype == dtype else x.clone() for x in self.inputs)


class _Call(nn.Module):
    def __init__(self, op: Callable[..., Any], leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.op, self.spec = op, spec
        self.fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.given = [isinstance(leaf, Tensor) for leaf in leaves]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        waiting = iter(tensors)
        pairs = zip(self.given, self.fixed, strict=True)
        leaves = [next(waiting) if given else fixed for given, fixed in pairs]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = pytree.tree_leaves(self.op(first, *args, **kwargs))
        return tuple(r.clone() for r in results if isinstance(r, Tensor))


def samples(name: str, dtype: torch.dtype, most: int) -> Iterator[Sample]:
    """The first samples of an operator whose inputs are plain tensors and whose results repeat."""
    op, found = OPERATORS[name], 0
    if not op.supports_dtype(dtype, "cpu"):
        return
    torch.manual_seed(0)
    for given in op.sample_inputs("cpu", dtype, requires_grad=False):
        leaves, spec = pytree.tree_flatten((given.input, given.args, given.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or not all(map(_is_plain, tensors)):
            continue
        module = _Call(op.op, leaves, spec).eval()
        inputs = tuple(t.detach().clone().contiguous() for t in tensors)
        first, second = module(*inputs), module(*inputs)
        if not first or not all(map(_is_plain, first)) or not all(map(_equal, first, second)):
            continue  # it draws random numbers, or leaves memory as it is
        yield Sample(module, inputs, str([getattr(leaf, "shape", leaf) for leaf in leaves]))
        found += 1
        if found == most:
            return


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_complex()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())


def difference(found: Tensor, eager: Tensor, exact: Tensor) -> str:
    """What is wrong with a result; empty where each element is near eager's, or near fp64's.

    Near is ten thousand roundings of the element or a hundred of the largest, or ten times what
    eager itself loses.
    """
    engine, plain = found.numpy(), eager.numpy()
    if engine.shape != plain.shape or engine.dtype != plain.dtype:
        return f"{engine.dtype}{engine.shape}, eager gives {plain.dtype}{plain.shape}"
    if plain.dtype.kind in "biu":
        wrong = engine != plain
    else:
        ours, theirs, wanted = (a.astype(np.float64) for a in (engine, plain, exact.numpy()))
        with np.errstate(all="ignore"):
            same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs)) | (ours == wanted)
            largest = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)
            lost = np.nan_to_num(np.abs(theirs - wanted), nan=0.0, posinf=0.0)
            allowed = 1e-3 * np.abs(theirs) + 1e-5 * largest + 10 * lost
            error = np.fmin(np.abs(ours - theirs), np.abs(ours - wanted))
        wrong = ~same & ~(error <= np.where(np.isfinite(allowed), allowed, 0.0))
    if not wrong.any():
        return ""
    place = tuple(np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size}: {engine[place]}, eager gives {plain[place]}"
