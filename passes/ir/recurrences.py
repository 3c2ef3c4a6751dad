"""LSTMs, GRUs and RNNs: trace them whole, over any number of steps.

A trace runs each op on tensors without values.  For these, torch goes through the steps one by one,
which fixes how many there are; here they get results of the right shapes at once.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from enginecast.library_names import aten, private

_OPS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
_CALLS: dict[Any, Any] = dict(
    zip((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _OPS, strict=True)
)
_CALLS |= {op: op for op in _OPS}


@contextmanager
def whole_recurrences() -> Iterator[None]:
    """Within the block, such an op is not taken apart where the number of its steps varies."""
    keys = private("torch._C.DispatchKey", "a recurrent layer")
    kinds = (keys.CompositeImplicitAutograd, keys.Autograd)
    plain = [(op, key, op.py_kernels.get(key)) for op in _OPS for key in kinds]
    for op, key, kernel in plain:
        if kernel is not None:
            op.py_kernels[key] = _shapes_of(kernel)
    _forget()
    try:
        yield
    finally:
        for op, key, kernel in plain:
            if kernel is not None:
                op.py_kernels[key] = kernel
        _forget()


class AsOne(TorchFunctionMode):
    """Runs such an op, on tensors without values, as a few that depend on all that it reads and
    have results of its shapes: its kernels write in place, once a step.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _CALLS or not isinstance(args[3], bool):  # of packed sequences
            return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(args)
        read = torch.stack([leaf.sum() for leaf in leaves if isinstance(leaf, Tensor)]).sum()
        options = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        read = read + zlib.crc32(repr((str(_CALLS[func]), options)).encode())
        results = _results(*args)
        return tuple(torch.zeros_like(each) + read * place for place, each in enumerate(results))


def _forget() -> None:
    """torch remembers which kernel an op has."""
    for op in _OPS:
        op._dispatch_cache.clear()


def _shapes_of(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, *rest: Any) -> Any:
        steps = x.shape[1 if rest[-1] else 0]
        varies = isinstance(steps, SymInt) and isinstance(x, FakeTensor)
        return _results(x, *rest) if varies else kernel(x, *rest)

    return run


def _results(
    x: Tensor,
    start: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """New tensors of the shapes of what such an op returns."""
    states = [start] if isinstance(start, Tensor) else list(start)
    width = states[0].shape[-1] * (2 if both_ways else 1)
    rows = x.transpose(0, 1) if batch_first else x
    outputs = x.new_empty(*rows.shape[:2], width)
    ends = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in states)
    return (outputs.transpose(0, 1) if batch_first else outputs, *ends)
