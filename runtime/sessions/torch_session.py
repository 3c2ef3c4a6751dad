"""Common parts of sessions that run an engine with torch: providers, devices, threads, tensors.

torch is imported when such an engine is opened or run, and not before.
"""

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from enginecast.errors import InputError, UsageError
from enginecast.installation import required
from enginecast.runtime.bundle.manifest import EngineRecord
from enginecast.runtime.device.gpu import require_cuda
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.runtime.device.torch_values import to_host, to_tensor
from enginecast.runtime.sessions.session import Session
from enginecast.runtime.values.arrays import Array
from enginecast.runtime.values.device_tensor import Feed, shown_shapes

PROVIDERS = {"CPUExecutionProvider": "torch-cpu", "CUDAExecutionProvider": "torch-cuda"}
"""The torch provider for each of ONNX Runtime's providers."""
_ONE_BY_ONE = threading.Lock()


class TorchSession(Session):
    """An engine that torch runs.  Runs from several threads at once share it."""

    providers = PROVIDERS
    packages = ("torch",)

    def __init__(
        self, inputs: Sequence[str], outputs: Sequence[str], provider: str, threads: int | None
    ) -> None:
        """
        Args:
            inputs: names, in the order in which the engine takes them.
            outputs: names, in the order in which it gives them.
            provider: "torch-cpu" or "torch-cuda".
            threads: within one operator; None: as many as torch takes.
        """
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._provider = provider
        self._threads = threads

    @abstractmethod
    def compute(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Run once, within torch.no_grad(); a RuntimeError where torch refuses shapes or values."""

    @property
    def provider(self) -> str:
        return self._provider

    def run(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, Any]:
        """Run once; the values are tensors, where they were computed."""
        import torch

        device = self._provider.removeprefix("torch-")
        tensors = [to_tensor(name, feeds[name], device) for name in self._inputs]
        try:
            with ExitStack() as stack:
                if self._threads is not None:
                    # torch has one number of threads for the whole process, so runs with an own
                    # one go one by one.
                    stack.enter_context(_ONE_BY_ONE)
                    stack.enter_context(torch_threads(self._threads))
                stack.enter_context(torch.no_grad())
                found = self.compute(tensors)
        except RuntimeError as error:
            # A TorchScript error puts its reason last, after its own traceback.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = lines[-1] if "TorchScript" in lines[0] else lines[0]
            shapes = shown_shapes(feeds)
            raise InputError(f"the {self.name} engine failed on {shapes}: {reason}") from error
        named = dict(zip(self._outputs, found, strict=True))
        return {name: named[name] for name in outputs}

    def to_host(self, value: Any) -> Array:
        return to_host(value)


def provider_of(name: str, kind: str) -> str:
    """ "torch-cpu" for "CPUExecutionProvider"; its own names stay; a UsageError for others."""
    if name in PROVIDERS.values():
        return name
    if name not in PROVIDERS:
        raise UsageError(
            f"{name}: a {kind} engine runs on {' or '.join(PROVIDERS.values())}",
            hint="Use device='cpu' or device='cuda' (--device).",
        )
    return PROVIDERS[name]


def require_torch(record: EngineRecord, kind: str) -> Any:
    """The module torch, for a kind of engine."""
    instead = "or export with --target onnxruntime"
    with required("torch", f"{record.file}: a {kind} engine", "export", instead=instead):
        import torch
    return torch


def require_device(torch: Any, record: EngineRecord, provider: str, why: str) -> None:
    """Refuse a device that is not here, or not the engine's; `why` is what binds it."""
    if provider == "torch-cuda":
        require_cuda(torch)
    if record.providers and provider not in record.providers:
        raise UsageError(
            f"{record.file}: made for {record.providers[0]}, not for {provider}: {why}",
            hint="Export it with the other --device, on a machine that has it.",
        )
