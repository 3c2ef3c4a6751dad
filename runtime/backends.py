"""The names of what runs engines, as users prefer one to another: "tensorrt", "onnxruntime-cpu"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginecast.errors import EnginecastError, UsageError

PROVIDERS = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""ONNX Runtime's execution providers by device, the wanted one first."""


@dataclass(frozen=True)
class Backend:
    """One way to run an engine."""

    name: str
    target: str
    """Of the engines that it runs."""
    device: str

    @property
    def providers(self) -> tuple[str, ...]:
        """The providers that `open_session` gets, the wanted one first."""
        return PROVIDERS[self.device]


@dataclass(frozen=True)
class Refused:
    """A backend that cannot be had, and why."""

    backend: Backend
    error: EnginecastError

    @property
    def reason(self) -> str:
        """The whole message, with what to do about it."""
        return ". ".join(part for part in (self.error.message, self.error.hint) if part)


def _backends() -> Mapping[str, Backend]:
    found = [Backend("tensorrt", "tensorrt", "cuda")]
    for target in ("onnxruntime", "aotinductor", "torchscript"):
        found += [Backend(f"{target}-{device}", target, device) for device in ("cuda", "cpu")]
    return {one.name: one for one in found}


BACKENDS = _backends()
"""By name."""


def backends_of(prefer: Sequence[str]) -> tuple[Backend, ...]:
    """The backends of these names, in their order.

    Raises:
        UsageError: there is no such name, one comes twice, or there are none.
    """
    if isinstance(prefer, str) or not prefer:
        raise UsageError(f"prefer: expected a list of backends, got {prefer!r}", hint=_known())
    for place, name in enumerate(prefer):
        if name not in BACKENDS:
            raise UsageError(f"prefer: no backend is called {name!r}", hint=_known())
        if name in prefer[:place]:
            raise UsageError(f"prefer: {name} comes twice")
    return tuple(BACKENDS[name] for name in prefer)


def name_of(target: str, provider: str) -> str:
    """What a session is called: "onnxruntime-cpu"; "onnxruntime-openvino" of other providers.

    Args:
        target: of the engine.
        provider: as the session says: "CPUExecutionProvider", "torch-cuda".
    """
    if target in BACKENDS:
        return target
    device = provider.removesuffix("ExecutionProvider").removeprefix("torch-").lower()
    return f"{target}-{device}"


def _known() -> str:
    return f"There are {', '.join(BACKENDS)}."
