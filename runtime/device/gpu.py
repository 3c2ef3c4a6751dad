"""The GPU that an engine runs on: its identity, memory and streams, through torch."""

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enginecast.errors import MissingError
from enginecast.runtime.device.cuda_graphs import Run, Tensors, recorder
from enginecast.runtime.device.torch_values import as_tensor, to_host
from enginecast.runtime.values.arrays import Array

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_NVML = "libnvidia-ml.so.1"
_NVML_VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


class Gpu:
    """The GPU that torch uses when it is made.  Tensors are torch's; streams are opaque."""

    def __init__(self, torch: Any) -> None:
        """A MissingError where torch sees no GPU."""
        require_cuda(torch)
        self._torch = torch
        self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def name(self) -> str:
        """Such as "NVIDIA H200"."""
        return str(self._torch.cuda.get_device_name(self._device))

    @property
    def arch(self) -> str:
        """Such as "sm90"."""
        return arch_of(self._torch, self._device)

    @property
    def capability(self) -> str:
        """Compute capability, such as "9.0"."""
        major, minor = self._torch.cuda.get_device_capability(self._device)
        return f"{major}.{minor}"

    @property
    def driver(self) -> str:
        """Version of NVIDIA's driver, such as "580.95.05"."""
        return driver_version()

    @property
    def cuda(self) -> str:
        """Major version of CUDA, such as "13"."""
        return cuda_major(self._torch)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A tensor on the GPU, of one of the manifest's dtypes, with any values."""
        torch = self._torch
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self._device)

    @property
    def place(self) -> tuple[str, int]:
        """Where tensors have to lie that are read where they are: ("cuda", 0)."""
        return "cuda", int(self._device.index)

    def to_device(self, array: Array) -> Any:
        """A copy of a contiguous array there; it is over when this returns."""
        return as_tensor(array).to(self._device)

    def to_host(self, value: Any) -> Array:
        """A tensor as an array, after the work of the current stream."""
        return to_host(value)

    def new_stream(self) -> Any:
        return self._torch.cuda.Stream(self._device)

    def is_idle(self, stream: Any) -> bool:
        """Whether all work of a stream is done."""
        return bool(stream.query())

    @contextmanager
    def on(self, stream: Any, inputs: Tensors) -> Iterator[Callable[[Tensors], None]]:
        """A context: what the caller's stream holds comes first, and what the caller does next
        comes after.  It gives a function that hands tensors made within to the caller's stream.
        """
        cuda = self._torch.cuda
        with cuda.device(self._device):
            caller = cuda.current_stream()
            stream.wait_stream(caller)
            # The allocator must not give memory away that the other stream still works on.
            _lend(inputs, stream)
            try:
                with cuda.stream(stream):
                    yield lambda tensors: _lend(tensors, caller)
            finally:
                caller.wait_stream(stream)

    def current_stream(self) -> int:
        """The handle of the stream in use, as TensorRT takes it."""
        return int(self._torch.cuda.current_stream(self._device).cuda_stream)

    def graph_recorder(self) -> Callable[[Run, Tensors], Run]:
        """What records runs as CUDA graphs: see `cuda_graphs.recorder`."""
        # Other threads go on with runs of their own meanwhile.
        return recorder(self._torch, mode="thread_local")


def require_cuda(torch: Any) -> None:
    """A MissingError where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise MissingError(
            "device cuda: torch sees no CUDA GPU here", hint="See `enginecast doctor`."
        )


def arch_of(torch: Any, device: Any = None) -> str:
    """The architecture of a GPU, such as "sm90"; None: of the one in use."""
    require_cuda(torch)
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def cuda_major(torch: Any) -> str:
    """The major version of CUDA, by which its libraries are called; "none" for a CPU build."""
    return str(torch.version.cuda or "none").split(".")[0]


def driver_version() -> str:
    """The version of NVIDIA's driver: what its own library says, or else the kernel's module."""
    version = _by_nvml()
    if not version and _KERNEL_MODULE.is_file():
        version = module_version(_KERNEL_MODULE.read_text(encoding="utf-8"))
    if not version:
        raise MissingError(
            f"the version of NVIDIA's driver: found in neither {_NVML} nor {_KERNEL_MODULE}",
            hint="Is the driver installed, and exposed to this container?",
        )
    return version


def module_version(text: str) -> str:
    """The driver's version in the text of /proc/driver/nvidia/version; empty: there is none."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def _by_nvml() -> str:
    """https://docs.nvidia.com/deploy/nvml-api/: each call answers 0 when it went well."""
    try:
        library = ctypes.CDLL(_NVML)
    except OSError:
        return ""
    if library.nvmlInit_v2():
        return ""
    try:
        text = ctypes.create_string_buffer(_NVML_VERSION_BYTES)
        failed = library.nvmlSystemGetDriverVersion(text, _NVML_VERSION_BYTES)
        return "" if failed else text.value.decode("ascii", "replace")
    finally:
        library.nvmlShutdown()


def _lend(tensors: Tensors, stream: Any) -> None:
    for tensor in tensors:
        tensor.record_stream(stream)
