"""Running a TorchScript engine: the one kind of engine that needs torch.

torch is imported when such an engine is opened, and nowhere else in this folder.
"""

import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from enginecast.errors import BundleError, InputError, MissingError, UsageError
from enginecast.runtime.arrays import BFLOAT16, Array
from enginecast.runtime.bundle import Bundle
from enginecast.runtime.manifest import EngineRecord

PROVIDERS = {"CPUExecutionProvider": "torch-cpu", "CUDAExecutionProvider": "torch-cuda"}
"""What runs a TorchScript engine where ONNX Runtime's provider was asked for."""


class TorchScriptSession:
    """One TorchScript module.  Runs from several threads at once share it; it keeps no state."""

    def __init__(self, module: Any, bundle: Bundle, provider: str, threads: int | None) -> None:
        self._module = module
        self._inputs = tuple(spec.name for spec in bundle.manifest.inputs)
        self._outputs = tuple(spec.name for spec in bundle.manifest.outputs)
        self._provider = provider
        self._threads = threads
        self._lock = threading.Lock()

    @property
    def provider(self) -> str:
        return self._provider

    def run(self, arrays: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Any]:
        """Run once; the values are tensors, where they were computed."""
        import torch
        from torch.jit._fuser import optimized_execution

        device = _device(self._provider)
        tensors = [_to_tensor(arrays[name]).to(device) for name in self._inputs]
        try:
            # Without the optimising executor, which compiles anew by what the first runs were like.
            with self._own_threads(), torch.no_grad(), optimized_execution(False):
                found = self._module(*tensors)
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            reason = str(error).strip().splitlines()[-1:]
            raise InputError(f"TorchScript failed on {shapes}: {' '.join(reason)}") from error
        named = dict(zip(self._outputs, found, strict=True))
        return {name: named[name] for name in outputs}

    def to_host(self, value: Any) -> Array:
        import torch

        tensor = value.detach().cpu().contiguous()
        if tensor.dtype != torch.bfloat16:
            return np.asarray(tensor.numpy())
        return np.asarray(tensor.view(torch.int16).numpy().view(BFLOAT16))

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        """torch has one number of threads for the whole process, so such runs go one by one."""
        import torch

        if self._threads is None:
            yield
            return
        with self._lock:
            before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            try:
                yield
            finally:
                torch.set_num_threads(before)


def open_session(
    bundle: Bundle, record: EngineRecord, providers: Sequence[str], threads: int | None
) -> TorchScriptSession:
    """Open an engine of a bundle.

    Args:
        bundle: a bundle whose digests were checked: the file is code.
        record: the engine, of target "torchscript".
        providers: ONNX Runtime's names; the first says whether the CPU or a GPU is wanted.
        threads: threads within one operator; None: as many as torch takes.

    Raises:
        MissingError: there is no torch, none with TorchScript, or no GPU.
        UsageError: the engine was made for another device.
        BundleError: torch refuses the file.
    """
    provider = provider_of(providers[0])
    torch = _require_torch(record)
    if provider == "torch-cuda" and not torch.cuda.is_available():
        raise MissingError(
            "device cuda: torch sees no CUDA GPU here", hint="See `enginecast doctor`."
        )
    if record.providers and provider not in record.providers:
        raise UsageError(
            f"{record.file}: made for {record.providers[0]}, not for {provider}: TorchScript keeps"
            " the device that it was traced on",
            hint="Export it with the other --device, on a machine that has it.",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            module = torch.jit.load(str(bundle.path(record.file)), map_location=_device(provider))
        except Exception as error:  # torch raises RuntimeError, and others for what is no archive
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise BundleError(f"{record.file}: torch.jit.load refuses it: {first}") from error
        module.eval()
    return TorchScriptSession(module, bundle, provider, threads)


def provider_of(name: str) -> str:
    """ "torch-cpu" for "CPUExecutionProvider"; its own names stay.

    Raises:
        UsageError: a provider of ONNX Runtime that torch has nothing like.
    """
    if name in PROVIDERS.values():
        return name
    if name not in PROVIDERS:
        raise UsageError(
            f"{name}: a TorchScript engine runs on {' or '.join(PROVIDERS.values())}",
            hint="Use device='cpu' or device='cuda' (--device).",
        )
    return PROVIDERS[name]


def _require_torch(record: EngineRecord) -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingError(
            f"{record.file}: a TorchScript engine needs torch, which is not installed: {error}",
            hint="pip install torch, or export with --target onnxruntime.",
        ) from error
    if not callable(getattr(torch.jit, "load", None)):
        raise MissingError(
            f"{record.file}: torch {torch.__version__} has no torch.jit.load: PyTorch has dropped"
            " TorchScript",
            hint="Use torch 2.11 to 2.13 for this engine.",
        )
    minimum = record.minimum_runtime.partition(">=")[2]
    if minimum and _version(torch.__version__) < _version(minimum):
        raise MissingError(
            f"{record.file}: needs {record.minimum_runtime}, found torch {torch.__version__}",
            hint=f"pip install '{record.minimum_runtime}'",
        )
    return torch


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _device(provider: str) -> str:
    return provider.removeprefix("torch-")


def _to_tensor(array: Array) -> Any:
    """A copy: the model may write into its inputs."""
    import torch

    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
