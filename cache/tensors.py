"""Stored arrays as torch tensors: numpy has no bfloat16 of its own that torch would take."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from enginecast.cache.asking import first_row
from enginecast.cache.shard_writing import Entry
from enginecast.cache.spec import EncoderSpec, OutputSpec
from enginecast.runtime.arrays import BFLOAT16, Array

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of an output's dtype in a spec."""
    return _DTYPES[name]


def to_tensor(array: Array) -> Tensor:
    """A tensor over the memory of an array; over a copy, where that may not be written to."""
    array = array if array.flags.writeable else array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(tensor: Tensor) -> Array:
    """An array over the memory of a tensor on the CPU."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    array: Array = tensor.numpy()
    return array


def as_batch(
    spec: EncoderSpec, output: OutputSpec, entries: Sequence[Entry], sequence: int
) -> Tensor:
    """An output of some texts: [texts, sequence, width], zeros where nothing is stored.

    An output per text is [texts, width].  There may be none.
    """
    values = [entry.outputs[output.name] for entry in entries]
    if output.per == "text":
        return to_tensor(np.stack(values) if values else _zeros(output, 0))
    made = _zeros(output, len(entries), sequence)
    for row, entry, stored in zip(made, entries, values, strict=True):
        begin = first_row(spec, len(entry.ids), sequence)
        row[begin : begin + len(stored)] = stored
    return to_tensor(made)


def _zeros(output: OutputSpec, *shape: int) -> Array:
    return np.zeros((*shape, output.width), np.dtype(output.dtype))
