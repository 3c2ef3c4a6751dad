"""Running a TorchScript engine: the one kind of engine that needs torch.

torch is imported when such an engine is opened, and nowhere else in this folder.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from enginecast.errors import BundleError, InputError, MissingError
from enginecast.runtime.arrays import Array
from enginecast.runtime.bundle import Bundle
from enginecast.runtime.device_tensor import Feed
from enginecast.runtime.manifest import EngineRecord
from enginecast.runtime.torch_values import (
    Threads,
    device_of,
    provider_of,
    require_device,
    require_torch,
    to_host,
    to_tensor,
)


class TorchScriptSession:
    """One TorchScript module.  Runs from several threads at once share it; it keeps no state."""

    def __init__(self, module: Any, bundle: Bundle, provider: str, threads: int | None) -> None:
        self._module = module
        self._inputs = tuple(spec.name for spec in bundle.manifest.inputs)
        self._outputs = tuple(spec.name for spec in bundle.manifest.outputs)
        self._provider = provider
        self._own_threads = Threads(threads)

    @property
    def provider(self) -> str:
        return self._provider

    def run(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, Any]:
        """Run once; the values are tensors, where they were computed."""
        import torch
        from torch.jit._fuser import optimized_execution

        device = device_of(self._provider)
        tensors = [to_tensor(name, feeds[name], device) for name in self._inputs]
        try:
            # Without the optimising executor, which compiles anew by what the first runs were like.
            with self._own_threads(), torch.no_grad(), optimized_execution(False):
                found = self._module(*tensors)
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {list(feed.shape)}" for name, feed in feeds.items())
            reason = str(error).strip().splitlines()[-1:]
            raise InputError(f"TorchScript failed on {shapes}: {' '.join(reason)}") from error
        named = dict(zip(self._outputs, found, strict=True))
        return {name: named[name] for name in outputs}

    def to_host(self, value: Any) -> Array:
        return to_host(value)


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
    provider = provider_of(providers[0], "TorchScript")
    torch = _require_torchscript(record)
    require_device(torch, record, provider, "TorchScript keeps the device that it was traced on")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            module = torch.jit.load(str(bundle.path(record.file)), map_location=device_of(provider))
        except Exception as error:  # torch raises RuntimeError, and others for what is no archive
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise BundleError(f"{record.file}: torch.jit.load refuses it: {first}") from error
        module.eval()
    return TorchScriptSession(module, bundle, provider, threads)


def _require_torchscript(record: EngineRecord) -> Any:
    torch = require_torch(record, "TorchScript")
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
