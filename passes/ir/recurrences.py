"""Trace LSTMs, GRUs and RNNs whole, over any number of steps.

A trace runs each op on tensors without values.  For these, torch goes through the steps one by one,
which fixes how many there are; here they get results of the right shapes at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor

from enginecast.library_names import aten, private

_OPS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


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


def _forget() -> None:
    """torch remembers which kernel an op has."""
    for op in _OPS:
        op._dispatch_cache.clear()


def _shapes_of(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        x: Tensor,
        start: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both_ways: bool,
        batch_first: bool,
    ) -> Any:
        steps = x.shape[1 if batch_first else 0]
        if not isinstance(steps, SymInt) or not isinstance(x, FakeTensor):
            rest = (has_biases, layers, dropout, train, both_ways, batch_first)
            return kernel(x, start, weights, *rest)
        states = [start] if isinstance(start, Tensor) else list(start)
        batch = x.shape[0 if batch_first else 1]
        width = states[0].shape[-1] * (2 if both_ways else 1)
        found = x.new_empty(steps, batch, width)
        ends = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in states)
        return (found.transpose(0, 1) if batch_first else found, *ends)

    return run
