"""GGUF files: weights in quantized blocks, which the `gguf` package dequantizes to fp32.

Names are those that the file's maker gave: llama.cpp's for encoders, which transformers knows, and
those of the authors for denoisers, as in ComfyUI-GGUF's files.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.sources.weights.finite import lost_of, require_finite
from enginecast.capture.sources.weights.published import Stored, new_tensor
from enginecast.errors import MissingError, SourceError, first_line

_PLAIN = ("F32", "F16", "F64", "I8", "I16", "I32", "I64")
"""Types that numpy has."""
_SHAPE = "comfy.gguf.orig_shape.{}"
"""Where ComfyUI-GGUF notes a shape of more than four dimensions."""


def stored_gguf(file: Path, module: nn.Module | None = None) -> Stored:
    """Read a GGUF file, and dequantize what is in blocks.

    Args:
        module: one of transformers, whose names the tensors get; None: they keep those of the file.

    Raises:
        SourceError: the file is damaged, has a type that is not known, or is of another model.
        MissingError: gguf is not installed.
    """
    with _reading(file):
        gguf: Any = import_module("gguf")
        reader = gguf.GGUFReader(file)
    tensors, kinds = dict[str, Tensor](), Counter[str]()
    quantized = 0
    for each in reader.tensors:
        kind = each.tensor_type.name
        if kind not in (*_PLAIN, "BF16"):
            quantized += each.n_bytes
            kinds[f"{kind} of GGUF"] += 1
        if module is not None:
            continue
        with _reading(file, f"{each.name} is {kind}: "):
            values = torch.from_numpy(
                each.data.copy() if kind in _PLAIN else gguf.dequantize(each.data, each.tensor_type)
            )
        shape = reader.get_field(_SHAPE.format(each.name))
        if shape is not None:
            values = values.view([int(shape.parts[part][0]) for part in shape.data])
        tensors[each.name] = new_tensor(values.shape, values.dtype).copy_(values)
    if module is not None:
        tensors = _of_transformers(file, module)
    for name, tensor in tensors.items():
        require_finite(lost_of(tensor), f"{file}: {name}")
    layers = sum(len(each.shape) > 1 for each in reader.tensors)
    size = sum(each.n_bytes for each in reader.tensors)
    return Stored(tensors, kinds, layers, int(quantized), int(size))


def _of_transformers(file: Path, module: nn.Module) -> dict[str, Tensor]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _reading(file), quiet_torch():
        read: Mapping[str, Any] = load_gguf_checkpoint(
            file, return_tensors=True, model_to_load=module
        )
        return dict(read["tensors"])


@contextmanager
def _reading(file: Path, what: str = "") -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingError(
            f"{file} needs {error.name}, which is not installed", hint="pip install gguf"
        ) from error
    except Exception as error:  # numpy's, of damaged files, and those of unknown types
        raise SourceError(
            f"{file} cannot be read as GGUF: {what}{first_line(error)}",
            hint="The file is truncated or damaged, or of a type or architecture that the installed"
            " gguf and transformers do not know.",
        ) from error
