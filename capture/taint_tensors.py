"""What methods, attributes and functions of torch make of a tensor, as far as Python sees it."""

import ast
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from enginecast.capture.taint import (
    CLEAN,
    UNKNOWN,
    Value,
    constant,
    mix,
    scalar,
    shape_of,
    tensor_from,
)
from enginecast.capture.taint_frame import Arguments, Frame

RANK = {"ndim", "dim", "ndimension"}
SHAPES = {
    *("shape", "size", "numel", "nelement", "stride", "nbytes", "storage_offset", "__len__"),
    *("sym_size", "sym_numel", "is_contiguous"),
}
DTYPES = {"dtype", "is_floating_point", "is_complex", "element_size", "itemsize", "is_signed"}
NO_DATA = {
    *("device", "layout", "is_cuda", "is_cpu", "is_mps", "is_xpu", "requires_grad", "grad"),
    *("grad_fn", "is_leaf", "is_sparse", "is_quantized", "is_nested", "is_meta", "names", "name"),
    *("data_ptr", "get_device", "untyped_storage", "is_inference", "_version", "__class__"),
}
READS = {"item", "__bool__", "__int__", "__float__", "__index__"}
SIZED = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"}
SPLITS = {"split", "unbind", "tensor_split", "split_with_sizes"}
TUPLES = {"chunk", "topk", "sort", "aminmax", "meshgrid", "broadcast_tensors"}
VIEWS = {
    *("view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "narrow"),
    *("select", "t", "detach", "flatten", "view_as", "expand_as", "unflatten", "swapaxes"),
    *("data", "T", "mT", "contiguous", "to", "float", "type_as", "cpu", "movedim"),
}
MASKS = {
    *("eq", "ne", "gt", "ge", "lt", "le", "isnan", "isinf", "isfinite", "logical_and", "bool"),
    *("logical_or", "logical_not", "logical_xor", "isin", "isclose", "equal"),
}
REDUCTIONS = {"sum", "any", "all", "max", "min", "mean", "norm", "prod", "amax", "amin", "argmax"}
CONSTANT_FILLS = {
    *("zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "eye"),
}
RANDOM = {"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "normal", "randperm"}
CREATORS = {
    *CONSTANT_FILLS,
    *RANDOM,
    *("arange", "linspace", "tensor", "as_tensor", "from_numpy", "scalar_tensor", "logspace"),
}
SHAPERS = {*CREATORS, "view", "reshape", "expand", "narrow", "repeat", "split", "split_with_sizes"}
"""Calls in which a number that was read becomes a size."""
PREDICATES = {"equal", "allclose", "is_nonzero"}
NO_TENSOR = {
    *("is_tensor", "is_floating_point", "is_complex", "numel", "result_type", "promote_types"),
    *("can_cast", "broadcast_shapes", "get_default_dtype", "is_storage", "finfo", "iinfo"),
    *("device", "Size", "dtype", "Generator", "is_autocast_enabled", "get_autocast_dtype"),
}


def tensor_attribute(value: Value, name: str) -> Value:
    """`value.name` of a tensor."""
    if name in RANK:
        return CLEAN
    if name in SHAPES:
        return shape_of(value)
    if name in DTYPES:
        return Value(labels=frozenset({"dtypes"}))
    if name in NO_DATA:
        return CLEAN
    return replace(value, const=value.const if name == "data" else UNKNOWN, mask=False)


def tensor_method(
    value: Value, name: str, arguments: Arguments, frame: Frame, node: ast.Call
) -> Value:
    """A method of a tensor; notes what it reads or writes."""
    if name in READS:
        return frame.read("item", node, value)
    if name == "tolist":
        return replace(frame.read("tolist", node, value, blocking=True), many=True)
    if name in ("numpy", "__array__"):
        return frame.read("numpy", node, value, blocking=True)
    if name in RANK | SHAPES | DTYPES | NO_DATA or (name == "type" and not arguments.all):
        return tensor_attribute(value, name)
    if name.endswith("_") and not name.endswith("__"):
        return _in_place(value, name, arguments, frame, node)
    return operator(name, (value, *arguments.all), frame, node, is_method=True)


def _in_place(value: Value, name: str, arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    if name == "requires_grad_":
        return value
    if value.owner:
        frame.meet("state", node, value, blocking=True)
        frame.walk.write_state(None, value.owner)
    written = tensor_from((value, *arguments.all))
    kept = replace(written, owner=value.owner, sized=value.sized)
    target = node.func.value if isinstance(node.func, ast.Attribute) else None
    if isinstance(target, ast.Name) and target.id in frame.names:
        frame.names[target.id] = kept
    return kept


def operator(
    name: str, values: tuple[Value, ...], frame: Frame, node: ast.Call, *, is_method: bool = False
) -> Value:
    """An operator of torch by its name, as a function or as a method of its first value."""
    if name in SIZED or (name == "where" and len(values) == 1):
        found = tensor_from(values)
        frame.meet("nonzero", node, found, blocking=False)
        return replace(found, sized=True)
    if name == "repeat_interleave" and len(values) > 1 and values[1].is_one_tensor:
        frame.meet("nonzero", node, values[1], blocking=False)
        return replace(tensor_from(values), sized=True)
    if name in PREDICATES:
        return frame.read("item", node, tensor_from(values))
    made = tensor_from(values)
    if name in CONSTANT_FILLS:
        made = replace(made, labels=frozenset())
    is_sized = made.sized and not (name in REDUCTIONS and len(values) == 1)
    is_sized = is_sized or (name in SHAPERS and any(v.read for v in values))
    made = replace(made, sized=is_sized, mask=name in MASKS)
    if name in SPLITS:
        return replace(made, many=True, count=shape_of(values[0]) if values else None)
    if name in TUPLES:
        return replace(made, many=True)
    owner = values[0].owner if is_method and values and name in VIEWS else ""
    return replace(made, owner=owner)


def _answers(*, is_eager: bool) -> dict[int, bool | None]:
    """What torch's questions about tracing answer during an export, or in a plain run."""
    answers = {
        "jit.is_tracing": False,
        "jit.is_scripting": False,
        "_C._get_tracing_state": None,
        "_C._is_tracing": False,
        "compiler.is_compiling": not is_eager,
        "compiler.is_exporting": not is_eager,
        "compiler.is_dynamo_compiling": False,
        "is_grad_enabled": False,
        "is_inference_mode_enabled": False,
        "is_autocast_enabled": False,
    }
    found: dict[int, bool | None] = {}
    for dotted, answer in answers.items():
        owner: Any = torch
        for part in dotted.split("."):
            owner = getattr(owner, part, None)
        if owner is not None:
            found[id(owner)] = answer
    return found


ANSWERS = _answers(is_eager=False)
EAGER_ANSWERS = _answers(is_eager=True)


def torch_call(function: Any, arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    """A function or class of torch that is not walked through."""
    answers = EAGER_ANSWERS if frame.walk.is_eager else ANSWERS
    if id(function) in answers:
        return Value(const=answers[id(function)])
    name = getattr(function, "__name__", "")
    values = arguments.all
    if name == "is_tensor" and values and (values[0].is_one_tensor or values[0].const is None):
        return Value(const=values[0].tensor)
    if name == "numel" and values and values[0].tensor:
        return shape_of(values[0])
    if isinstance(function, type) and not issubclass(function, Tensor):
        return scalar(values)
    if name.startswith("_check") or name in NO_TENSOR:
        return replace(scalar(values), read=any(v.read for v in values))
    flat = mix(values)
    if not flat.tensor and name not in CREATORS:
        return flat
    return operator(name, values, frame, node)


def python_number(function: Any, value: Value, frame: Frame, node: ast.Call) -> Value:
    """`int(x)`, `float(x)`, `bool(x)`, `complex(x)` and the functions of `math`."""
    if value.is_data and not value.read:
        return frame.read("item", node, value)
    if isinstance(value.const, int | float | str | bool):
        try:
            return constant(function(value.const))
        except (ValueError, OverflowError, TypeError):
            return CLEAN
    return scalar((value,))


def is_math(function: object) -> bool:
    return getattr(function, "__module__", "") == math.__name__
