"""Checkpoints as they are published: weights in fp8, with their scales beside them or with none.

    NAME.weight, NAME.scale_weight       ComfyUI's fp8_scaled; `scaled_fp8` marks such a file
    NAME.weight, NAME.weight_scale       ComfyUI with NAME.comfy_quant, BFL, ModelOpt,
                                         compressed-tensors, fbgemm
    NAME.weight, NAME.weight_scale_inv   blocks of 128 x 128, as transformers' FineGrainedFP8Config
    NAME.weight                          a plain cast: what it holds is the weight

A weight is its values times its scale, rounded to fp32.  ComfyUI reads a weight without a scale as
a plain cast even where the file says that its weights have scales; here that is an error, since it
is what a lost scale looks like.

Sources: https://github.com/comfyanonymous/ComfyUI (QUANTIZATION.md, comfy/utils.py:
convert_old_quants), diffusers.quantizers.bfl, https://github.com/vllm-project/compressed-tensors.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path

import torch
from torch import Tensor

from enginecast.capture.sources.weights.finite import lost_of, require_finite
from enginecast.errors import MissingError, SourceError

Scales = Mapping[str, Tensor]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WEIGHT = "weight"
_SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
_OF_INPUTS = ("scale_input", "input_scale", "input_scale_ub")
"""Of activations, which are not rounded here."""
_FORMAT = "comfy_quant"
"""Bytes of JSON: {"format": "float8_e4m3fn"}."""
_MARKER = "scaled_fp8"
_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_TOKENIZERS = ("spiece_model", "tekken_model", "tokenizer_json")
"""Bytes of a tokenizer, which ComfyUI keeps among the weights."""
_BLOCK = 128
_ON_DISK = 1 << 22
"""Elements from which on a weight that was widened is a file."""


@dataclass(frozen=True)
class Stored:
    """What the files of a checkpoint hold, without what is quantized."""

    tensors: Mapping[str, Tensor]
    """By their names in the files; what was in fp8 is fp32, or bf16 without a scale."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """How many layers (weights with two dimensions or more) are quantized how: "float8_e4m3fn with
    scales"."""
    layers: int = 0
    """Those of the checkpoint."""
    quantized: int = 0
    """Bytes of the weights that are quantized, as they are in the files."""
    size: int = 0
    """Bytes of all weights in the files."""
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    """Of what was in fp8, by name: fp32, [] or [N, 1]; of plain casts 1; NaN where no such scale
    holds it in float8_e4m3fn."""

    def notes(self, *, widened: bool = True) -> tuple[str, ...]:
        """What a user should know of weights that are quantized, in a sentence."""
        if not self.quantized:
            return ()
        layers = self.layers
        kinds = ", ".join(f"{n} of {layers} layers are {kind}" for kind, n in self.kinds.items())
        bytes_ = " of ".join(f"{size / 2**20:.2f}" for size in (self.quantized, self.size))
        return (f"weights: {kinds} ({bytes_} MiB){': widened' * widened}",)

    def scales_by(self, rename: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Scales:
        """The scales of weights by the names that their class has.

        Args:
            rename: the tensors of the checkpoint by these names; it may split or merge them, and
                what it does to weights it does here to their scales, one for each element.

        Returns:
            fp32, [] or [N, 1]; NaN for weights that are in fp8, or in part, but in another form.
        """
        if not self.scales:
            return {}
        none = torch.zeros(())
        each = {
            name: self.scales.get(name, none).expand(tensor.shape)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in self.tensors.items()
        }
        found: dict[str, Tensor] = {}
        for name, scale in rename(each).items():
            if not scale.is_floating_point() or scale.ndim < 2:
                continue
            rows = scale.flatten(1)
            first = rows[:, :1]
            if bool((rows == first).all()) and bool((first > 0).all()):
                is_one = bool((first == first[0]).all())
                found[name] = first[0, 0].clone() if is_one else first.clone()
            elif bool((rows != 0).any()):
                found[name] = torch.tensor(torch.nan)
        return found


def stored(tensors: Mapping[str, Tensor], file: Path, formats: Mapping[str, str]) -> Stored:
    """Widen what is quantized in a checkpoint.

    Args:
        tensors: by their names in the files.
        file: for messages.
        formats: what the files say of layers, by name: "float8_e4m3fn".

    Raises:
        SourceError: a scale is not finite, of another shape or missing, or a format is not known.
        MissingError: no space is left on the disk for what was widened.
    """
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.dtype != torch.uint8 or _last(name) not in _TOKENIZERS
    }
    formats = {**formats, **{name: text for name, text in _said(kept, file)}}
    for layer, text in formats.items():
        if text not in _FORMATS:
            raise SourceError(
                f"{file}: {layer} is in the format {text!r}; expected {' or '.join(_FORMATS)}"
            )
    # Of each model in the file.
    scaled = tuple(name.removesuffix(_MARKER) for name in kept if _last(name) == _MARKER)
    scales: dict[str, Tensor] = {}
    for name in list(kept):
        layer, _, last = name.rpartition(".")
        weight = kept.get(f"{layer}.{_WEIGHT}")
        of_quantized = layer in formats or name.startswith(scaled)
        of_quantized |= weight is not None and weight.dtype in FP8
        if last in (_MARKER, _FORMAT) or (last in _OF_INPUTS and of_quantized):
            del kept[name]
        elif last in _SCALES and weight is not None:
            if weight.dtype.itemsize == 1 and weight.dtype not in FP8:
                raise SourceError(
                    f"{file}: {layer}.{_WEIGHT} is {_text(weight.dtype)} with {last}; expected"
                    f" {' or '.join(_FORMATS)}"
                )
            if weight.dtype in FP8:
                scales[f"{layer}.{_WEIGHT}"] = kept.pop(name)
            elif of_quantized and bool((kept[name].float() == 1).all()):
                del kept[name]  # beside a weight that was left as it is
    found, by_name = dict(kept), dict[str, Tensor]()
    kinds = Counter[str]()
    quantized = 0
    for name, tensor in kept.items():
        if tensor.dtype not in FP8:
            continue
        scale = scales.get(name)
        is_said = name.startswith(scaled) or name.removesuffix(f".{_WEIGHT}") in formats
        if scale is None and is_said:
            raise SourceError(
                f"{file}: {name} is {_text(tensor.dtype)} and has no scale, and the file says that"
                " its weights have",
                hint="Copy or download the checkpoint again.",
            )
        found[name] = _widened(tensor, scale, f"{file}: {name}")
        quantized += tensor.nbytes + (0 if scale is None else scale.nbytes)
        if tensor.ndim > 1:
            kinds[f"{_text(tensor.dtype)} {'without' if scale is None else 'with'} scales"] += 1
        by_row = torch.ones(()) if scale is None else _by_row(scale, tensor)
        if by_row is None or tensor.dtype != torch.float8_e4m3fn:
            by_row = torch.tensor(torch.nan)
        by_name[name] = by_row
    floats = [t for t in found.values() if t.is_floating_point() and t.ndim > 1]
    size = sum(t.nbytes for t in (*kept.values(), *scales.values()))
    return Stored(found, kinds, len(floats), quantized, size, by_name)


def _said(tensors: Mapping[str, Tensor], file: Path) -> Iterator[tuple[str, str]]:
    """The layers whose format stands beside them."""
    for name, tensor in tensors.items():
        if _last(name) == _FORMAT:
            try:
                said = json.loads(bytes(tensor.tolist()))["format"]
            except (ValueError, TypeError, KeyError) as error:
                raise SourceError(f"{file}: {name} holds no JSON with a format") from error
            yield name.removesuffix(f".{_FORMAT}"), str(said)


def _widened(tensor: Tensor, scale: Tensor | None, what: str) -> Tensor:
    if scale is None:
        wide = new_tensor(tensor.shape, torch.bfloat16).copy_(tensor)  # holds all that fp8 does
    else:
        if lost := lost_of(scale):
            raise SourceError(
                f"{what} has a scale with non-finite elements: {lost}",
                hint="Copy or download the checkpoint again.",
            )
        wide = (
            new_tensor(tensor.shape, torch.float32).copy_(tensor).mul_(_whole(scale, tensor, what))
        )
    require_finite(lost_of(wide), what)
    return wide


def new_tensor(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor; a large one is a file without a name, not memory that must be there."""
    count = prod(shape)
    if count < _ON_DISK:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="enginecast-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, dtype.itemsize * count)
        except OSError as error:
            raise MissingError(
                f"{file.name}: no space for weights in {_text(dtype)}: {error.strerror}",
                hint="Set TMPDIR to a folder on a disk with more.",
            ) from error
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)


def _by_row(scale: Tensor, tensor: Tensor) -> Tensor | None:
    """A scale of a whole weight, [], or of its rows, [N, 1]; None: of other parts of it."""
    if scale.numel() == 1:
        return scale.float().reshape(())
    if tensor.ndim == 2 and scale.shape in ((len(tensor),), (len(tensor), 1)):
        return scale.float().reshape(-1, 1)
    return None


def _whole(scale: Tensor, tensor: Tensor, what: str) -> Tensor:
    """A scale of a weight, of its rows or of its blocks, [] or in sizes that its own fit."""
    if (by_row := _by_row(scale, tensor)) is not None:
        return by_row
    if tensor.ndim == 2:
        rows, size = tensor.shape
        parts = scale.shape
        if len(parts) == 3 and parts[0] == rows and parts[2] == 1 and size % parts[1] == 0:
            return scale.float()[..., 0].repeat_interleave(size // parts[1], 1)
        if len(parts) == 2:
            steps = [_step(*each) for each in zip(tensor.shape, parts, strict=True)]
            if all(steps):
                wide = scale.float().repeat_interleave(steps[0], 0)[:rows]
                return wide.repeat_interleave(steps[1], 1)[:, :size]
    raise SourceError(
        f"{what} has shape {list(tensor.shape)} and a scale of {list(scale.shape)}; expected one"
        " for all, for each row, or for blocks"
    )


def _step(size: int, parts: int) -> int:
    """The size of the blocks that a dimension is in; 0: none fits."""
    if ceil(size / _BLOCK) == parts:
        return _BLOCK
    return size // parts if parts and size % parts == 0 else 0


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
