"""What `enginecast doctor` has to say, as data."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any

# Feature -> the flags of /proc/cpuinfo, any of which gives it, and what it is good for here.
CPU_FEATURES = {
    "avx2": ({"avx2"}, "fp32 kernels at full width"),
    "avx512": ({"avx512f"}, "fp32 kernels at double width"),
    "vnni": ({"avx512_vnni", "avx_vnni"}, "int8 engines faster than fp32"),
    "avx512_bf16": ({"avx512_bf16"}, "bf16 in torch at speed"),
    "amx_bf16": ({"amx_bf16"}, "bf16 matrix products in torch at speed"),
    "amx_int8": ({"amx_int8"}, "int8 matrix products at speed"),
}


@dataclass(frozen=True)
class Package:
    """A package that this one uses, as found."""

    name: str
    wanted: str
    """Such as ">=2.11"; may be empty."""
    version: str | None
    """None when it is not installed."""
    extra: str = ""
    """The optional feature that needs it; empty when everything does."""
    parts: str = ""
    """Optional parts of the package that are needed, such as "[data]"."""

    @property
    def fits(self) -> bool:
        if self.version is None:
            return False
        minimum = re.search(r">=\s*([\d.]+)", self.wanted)
        return minimum is None or _numbers(self.version) >= _numbers(minimum[1])

    @property
    def repair(self) -> str:
        """The command that installs it; empty when it fits."""
        if self.fits:
            return ""
        install = f"pip install '{self.name}{self.parts}{self.wanted}'"
        # The two builds of ONNX Runtime share one folder: the CPU build has to go first.
        gpu_build = self.name == "onnxruntime-gpu"
        return f"pip uninstall -y onnxruntime && {install}" if gpu_build else install


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as torch sees it."""

    name: str
    arch: str
    """Such as "sm90"."""
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Problem:
    """Something that will not work, and the command that repairs it."""

    what: str
    repair: str


@dataclass(frozen=True)
class Library:
    """A Python module of TensorRT, as found by importing it in a process of its own."""

    name: str
    version: str | None
    """None when it does not import."""
    installed: bool
    reason: str = ""
    """Why it does not import."""


@dataclass(frozen=True)
class TensorRT:
    """What there is of TensorRT here."""

    libraries: tuple[Library, ...]
    driver: str | None
    """Version of NVIDIA's driver."""
    wrong: tuple[str, ...] = ()
    """What does not go together, in sentences; empty: all that is installed does."""


@dataclass(frozen=True)
class Report:
    """Everything `enginecast doctor` says."""

    enginecast: str
    python: str
    platform: str
    cpu_features: dict[str, bool]
    """Empty where they cannot be read."""
    packages: tuple[Package, ...]
    providers: tuple[str, ...]
    """Execution providers of the installed ONNX Runtime."""
    torch_cuda: str | None
    """CUDA version that torch was built for; None for a CPU build or no torch."""
    gpus: tuple[Gpu, ...]
    problems: tuple[Problem, ...] = field(default=())
    torchscript: bool | None = None
    """Whether torch has TorchScript still; None without torch."""
    tensorrt: TensorRT | None = None
    """None where it was not looked at."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for `--json`."""
        data = asdict(self)
        for package, plain in zip(self.packages, data["packages"], strict=True):
            plain["repair"] = package.repair
        return data


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))
