"""Names for a checkpoint's tensors: the model's own, each tensor in the dtype it is stored in.

transformers renames keys, adds and drops prefixes, and merges or splits tensors on the way from a
file to a model, and it converts dtypes while it does.  Here it does the first without the second:
the model is loaded once for each float dtype of the file, and in each load the tensors of other
dtypes are stand-ins without memory, so nothing is converted and mapped tensors stay mapped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from enginecast.capture.sources.checkpoint import some, weights_file
from enginecast.errors import SourceError

LOADABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by their name in the file, and the class they are loaded into."""

    folder: Path
    """Where the weight files are, for messages."""
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of `from_pretrained`."""
    dropped: tuple[str, ...] = ()
    """Beginnings of names that the class leaves out on purpose."""

    def file(self, name: str = "") -> Path:
        """The file that holds a tensor, or tells of all of them."""
        return weights_file(self.folder, name)


def name_weights(checkpoint: Checkpoint, expected: Iterable[str]) -> dict[str, Tensor]:
    """A tensor for every name in `expected`, in the dtype of the file; tied names share theirs.

    Raises:
        SourceError: tensors are missing, left over, of another shape, or of a dtype that no model
            can be loaded in.
    """
    dtypes = _float_dtypes(checkpoint) or [torch.float32]
    own = {tensor.untyped_storage().data_ptr() for tensor in checkpoint.tensors.values()}
    named: dict[str, Tensor] = {}
    for dtype in dtypes:
        tensors = {name: _stand_in(t, dtype) for name, t in checkpoint.tensors.items()}
        for name, tensor in _load(checkpoint, dtype, tensors).items():
            if len(dtypes) == 1 or _is_real(tensor, own):
                named.setdefault(name, tensor)
    absent = [name for name in expected if name not in named]
    if absent:
        raise SourceError(
            f"{checkpoint.file()}: {absent[0]} is made from tensors of different dtypes",
            hint="Save the checkpoint in one dtype.",
        )
    return {name: named[name] for name in expected}


def _float_dtypes(checkpoint: Checkpoint) -> list[torch.dtype]:
    dtypes: list[torch.dtype] = []
    for name, tensor in checkpoint.tensors.items():
        if not tensor.is_floating_point() or tensor.dtype in dtypes:
            continue
        if tensor.dtype not in LOADABLE:
            raise SourceError(
                f"{checkpoint.file(name)}: {name} is stored as {tensor.dtype}, "
                "expected float32, float16, bfloat16 or float64"
            )
        dtypes.append(tensor.dtype)
    return dtypes


def _stand_in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` itself, or one NaN in its shape when it is a float of another dtype."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    return torch.full((), float("nan"), dtype=dtype).expand(tensor.shape)


def _is_real(tensor: Tensor, own: set[int]) -> bool:
    """Whether no stand-in had a part in `tensor`."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() in own or not tensor.is_floating_point():
        return True
    is_expanded = storage.nbytes() == tensor.element_size() < tensor.nbytes
    return not is_expanded and not bool(tensor.isnan().any())


def _load(
    checkpoint: Checkpoint, dtype: torch.dtype, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    model, info = keeping_no_fp32(checkpoint.model_class).from_pretrained(
        None,
        config=checkpoint.config,
        state_dict=tensors,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **checkpoint.options,
    )
    tied_once = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    _check_loaded(checkpoint, info, len(tied_once))
    state: dict[str, Tensor] = model.state_dict()
    return state


def keeping_no_fp32(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`model_class` without modules that it widens to float32 while it loads float16 (T5's wo)."""
    body = {"_get_dtype_plan": lambda self, dtype: {}, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), body)


def _check_loaded(checkpoint: Checkpoint, info: Mapping[str, Any], expected: int) -> None:
    """Raise for what transformers only warns of; the class has `expected` tensors."""
    model_class = checkpoint.model_class.__name__
    if info["mismatched_keys"]:
        name, stored, wanted = sorted(info["mismatched_keys"])[0]
        more = len(info["mismatched_keys"]) - 1
        raise SourceError(
            f"{checkpoint.file(name)}: {name} has shape {list(stored)}, "
            f"{model_class} expects {list(wanted)}" + (f", and {more} more differ" if more else ""),
            hint="config.json does not belong to these weights.",
        )
    missing = info["missing_keys"]
    if missing:
        raise SourceError(
            f"{checkpoint.file()}: {model_class} misses {some(missing)}; "
            f"expected {expected} tensors, got {expected - len(missing)}",
            hint="config.json names another class than the one that was saved, or the file is cut.",
        )
    unexpected = info["unexpected_keys"]
    extra = _unknown(checkpoint, [n for n in unexpected if not n.startswith(checkpoint.dropped)])
    if extra:
        raise SourceError(
            f"{checkpoint.file(extra[0])}: {model_class} has no place for {some(extra)}; "
            f"expected {expected} tensors, got {expected + len(extra)}",
            hint="config.json does not belong to these weights.",
        )
    if info["error_msgs"]:
        raise SourceError(f"{checkpoint.file()}: {info['error_msgs'][0]}")


def _unknown(checkpoint: Checkpoint, unexpected: Sequence[str]) -> list[str]:
    """Names left over that no dropped head explains.

    A head lies outside the base model's prefix: `cls.` or `lm_head.` beside `bert.`.
    """
    prefix = f"{checkpoint.model_class.base_model_prefix}."
    is_headless = any(name.startswith(prefix) for name in checkpoint.tensors) and not any(
        name.startswith(prefix) for name in unexpected
    )
    return [] if is_headless else sorted(unexpected)
