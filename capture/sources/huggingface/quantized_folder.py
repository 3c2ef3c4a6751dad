"""Folders whose config says how they are quantized.

Weights in fp8 with scales beside them are read here, whoever made them; what else there is, the
library that made it has to dequantize.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.python.quiet import quiet_torch, quiet_transformers
from enginecast.capture.sources.weights.checkpoint import WeightNames, read_stored
from enginecast.capture.sources.weights.published import Stored
from enginecast.errors import MissingError, SourceError, first_line

KEY = "quantization_config"
_IN_FP8: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "fp8": ("", ()),
    "fbgemm_fp8": ("", ()),
    "bfl": ("quant_type", ("fp8r",)),
    "modelopt": ("quant_algo", ("FP8",)),
    "compressed-tensors": ("format", ("float-quantized", "naive-quantized")),
}
"""Methods that have plain fp8 with scales, and the field that says so where they have others."""
_LIBRARIES: Mapping[str, tuple[str, str]] = {
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "torchao": ("torchao", "torchao"),
    "gptq": ("gptqmodel", "gptqmodel"),
    "awq": ("gptqmodel", "gptqmodel"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "modelopt": ("modelopt", "nvidia-modelopt"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "auto-round": ("auto_round", "auto-round"),
    "hqq": ("hqq", "hqq"),
}
"""By method: what is imported, and what pip calls it."""


def is_in_fp8(config: Mapping[str, Any], file: Path) -> bool:
    """Whether the weights are read here; else a library reads them, which is installed.

    Args:
        config: the content of `config.json`, which has a `quantization_config`.

    Raises:
        SourceError: the method is not known.
        MissingError: its library is not installed.
    """
    given = config[KEY] if isinstance(config[KEY], dict) else {}
    method = str(given.get("quant_method"))
    if method in _IN_FP8:
        field, values = _IN_FP8[method]
        said = given.get(field, given.get("quant_type")) if field else ""
        if not field or said in values:
            return True
    if method not in _LIBRARIES:
        known = ", ".join(sorted({*_IN_FP8, *_LIBRARIES}))
        raise SourceError(
            f"{file}: {KEY}: quant_method: expected one of {known}; got {method}",
            hint="Give the checkpoint it was quantized from.",
        )
    library, package = _LIBRARIES[method]
    try:
        import_module(library)
    except Exception as error:  # of a library that does not fit the machine
        lack = isinstance(error, ModuleNotFoundError) and error.name == library.split(".")[0]
        why = "is not installed" if lack else f"does not import: {first_line(error)}"
        raise MissingError(
            f"{file}: {KEY}: weights of {method} need {package}, which {why}",
            hint=f"pip install {package}",
        ) from error
    return False


def stored_in(
    folder: Path, names: WeightNames, config: Mapping[str, Any], model_class: type[Any]
) -> Stored:
    """What a folder holds; dequantized by its library where it has one.

    Args:
        model_class: of transformers or diffusers.

    Raises:
        SourceError: the library does not read it, or nothing is quantized.
        MissingError: see `is_in_fp8`.
    """
    file = folder / "config.json"
    if config.get(KEY) is None or is_in_fp8(config, file):
        found = read_stored(folder, names)
        if config.get(KEY) is not None and not found.quantized:
            raise SourceError(
                f"{file}: {KEY} says {config[KEY]['quant_method']}, and no weight is in fp8",
                hint="config.json does not belong to these weights.",
            )
        return found
    method = config[KEY]["quant_method"]
    if names.is_alone:
        raise SourceError(f"{names.single}: {method} reads folders; give it as one")
    with _reading(file, method), quiet_torch(), quiet_transformers():
        model: nn.Module = model_class.from_pretrained(
            folder,
            local_files_only=True,
            device_map="cpu",
            torch_dtype=torch.float32,
            variant=names.variant or None,
        )
        held = {name: each for name, each in model.named_parameters() if _is_quantized(each)}
        quantized = sum(map(_bytes_of, held.values()))
        with suppress(NotImplementedError):  # torchao's tensors do it one by one
            model.dequantize()  # type: ignore[operator]
        tensors = {name: _plain(each) for name, each in model.state_dict().items()}
    states = ((name, getattr(each, "quant_state", None)) for name, each in held.items())
    for name, state in states:
        if state is not None and state.shape[-1] % state.blocksize:
            raise SourceError(
                f"{file}: {name} has rows of {state.shape[-1]} values in blocks of"
                f" {state.blocksize}, which bitsandbytes 0.50 dequantizes wrongly on the CPU",
                hint="Give the checkpoint it was quantized from.",
            )
    left = [name for name in held if not tensors.get(name, held[name]).is_floating_point()]
    if not held or left:
        what = f"{left[0]} stays as it is" if left else "nothing is quantized"
        raise SourceError(f"{file}: {KEY}: {method} does not dequantize: {what}")
    kinds = Counter({method: len(held)})
    once = {tensor.data_ptr(): (name, tensor) for name, tensor in tensors.items()}.values()
    plain = sum(tensor.nbytes for name, tensor in once if name not in held)
    layers = sum(tensor.is_floating_point() and tensor.ndim > 1 for _, tensor in once)
    return Stored(tensors, kinds, layers, quantized, quantized + plain)


def _is_quantized(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or type(tensor) not in (nn.Parameter, Tensor)


def _bytes_of(tensor: Any) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.nbytes)
    return sum(_bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def _plain(tensor: Tensor) -> Tensor:
    if type(tensor) in (nn.Parameter, Tensor):
        return tensor.detach()
    found: Tensor = tensor.dequantize()
    return found.detach().float()


@contextmanager
def _reading(file: Path, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of a library, and of the kernels that it wants
        raise SourceError(
            f"{file}: {KEY}: {method} does not read it: {first_line(error)}"
        ) from error
