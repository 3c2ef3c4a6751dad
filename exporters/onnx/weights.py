"""The weights of an ONNX graph: promised while the graph is optimized, then written beside it.

A weight that is cast to 4 bits is one of 4 bits, two values in a byte, the earlier one in its low
half: neither torch nor safetensors has such a dtype, so the file has bytes.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype, to_torch_dtype
from torch import Tensor

from enginecast.exporters.weights.file import write_weights
from enginecast.passes.ir.deferred_weights import LazyWeight

INLINE = 1024
"""Bytes up to which a weight stays in the graph file, where ONNX tools fold and show it."""
NARROW = frozenset({ir.DataType.INT4, ir.DataType.FLOAT4E2M1})


def fill_weights(model: ir.Model, weights: Mapping[str, LazyWeight]) -> None:
    """Name every weight, and have its value computed when somebody asks, and not kept.

    Args:
        weights: by the name that the conversion gave them.

    A weight that the conversion left out is left out here too.
    """
    initializers = model.graph.initializers
    for placeholder, weight in weights.items():
        found = initializers.pop(placeholder, None)
        if found is None:
            continue
        found.name = weight.name
        found.const_value = ir.LazyTensor(
            partial(_evaluate, weight),
            from_torch_dtype(weight.dtype),
            ir.Shape(weight.shape),
            name=weight.name,
        )
        initializers[weight.name] = found


def narrow_weights(model: ir.Model) -> None:
    """Make weights of casts of weights to 4 bits, in place."""
    initializers = model.graph.initializers
    for node in list(model.graph):
        if node.op_type != "Cast" or node.outputs[0].dtype not in NARROW:
            continue
        [wide], [made] = node.inputs, node.outputs
        if wide is None or made.dtype is None or not wide.is_initializer():
            continue
        name = f"{wide.name}.{made.dtype.name.lower()}"
        if name not in initializers:
            promised = partial(_narrowed, wide.const_value, made.dtype)
            tensor = ir.LazyTensor(promised, made.dtype, wide.shape, name=name)
            value = ir.Value(name=name, shape=wide.shape, type=made.type, const_value=tensor)
            model.graph.register_initializer(value)
        made.replace_all_uses_with(initializers[name])
        model.graph.remove(node, safe=True)
        if not wide.uses():
            del initializers[wide.name]


def _narrowed(wide: ir.TensorProtocol, dtype: ir.DataType) -> ir.Tensor:
    return ir.Tensor(wide.numpy().astype(dtype.numpy()), dtype=dtype, name=wide.name)


def store_weights(model: ir.Model, path: Path) -> bool:
    """Write every large initializer of the finished graph, and refer to the file in its place.

    Args:
        model: afterwards it needs the file.

    Returns:
        Whether there are any.
    """
    large = []
    for value in model.graph.initializers.values():
        found = value.const_value
        assert found is not None
        if found.nbytes > INLINE:
            large.append(value)
        elif isinstance(found, ir.LazyTensor):
            value.const_value = ir.Tensor(found.numpy(), dtype=found.dtype, name=value.name)
    placed = write_weights(path, [_described(value) for value in large]) if large else {}
    for value in large:
        assert value.name is not None
        assert value.const_value is not None
        value.const_value = ir.ExternalTensor(
            path.name,
            *placed[value.name],
            value.const_value.dtype,
            shape=ir.Shape(value.const_value.shape),
            name=value.name,
            base_dir=path.parent,
        )
    return bool(large)


def _evaluate(weight: LazyWeight) -> ir.Tensor:
    dtype = from_torch_dtype(weight.dtype)
    # As bytes: numpy has no bf16 or fp8 of its own.
    raw = weight.compute().reshape(-1).view(torch.uint8).numpy()
    array = raw.view(dtype.numpy()).reshape(weight.shape)
    return ir.Tensor(array, dtype=dtype, name=weight.name)


def _described(value: ir.Value) -> LazyWeight:
    """An initializer as something to write: a weight, or a constant that the optimizer made."""
    found = value.const_value
    assert found is not None
    assert value.name is not None
    if found.dtype in NARROW:

        def packed() -> Tensor:
            return torch.frombuffer(bytearray(found.tobytes()), dtype=torch.uint8)

        return LazyWeight(value.name, torch.uint8, (found.nbytes,), packed)
    dtype, shape = to_torch_dtype(found.dtype), tuple(found.shape.numpy())

    def compute() -> Tensor:
        # torch wants memory it may write to, and says so where it cannot.
        array = np.require(found.numpy(), requirements=["C", "W"])
        return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).reshape(shape)

    return LazyWeight(value.name, dtype, shape, compute)
