"""What this machine has, what it lacks for which purpose, and the command that repairs it."""

import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from enginecast import __version__

# Feature -> the flags of /proc/cpuinfo, any of which gives it, and what it is good for here.
_CPU_FEATURES = {
    "avx2": ({"avx2"}, "fp32 kernels at full width"),
    "avx512": ({"avx512f"}, "fp32 kernels at double width"),
    "vnni": ({"avx512_vnni", "avx_vnni"}, "int8 engines faster than fp32"),
    "avx512_bf16": ({"avx512_bf16"}, "bf16 in torch at speed"),
    "amx_bf16": ({"amx_bf16"}, "bf16 matrix products in torch at speed"),
    "amx_int8": ({"amx_int8"}, "int8 matrix products at speed"),
}
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)\s*(?P<wanted>[^;\s]*)(?:.*extra == ['\"](?P<extra>\w+))?"
)
_DEVELOPMENT = "dev"


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
        install = f"pip install '{self.name}{self.wanted}'"
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

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for `--json`."""
        data = asdict(self)
        for package, plain in zip(self.packages, data["packages"], strict=True):
            plain["repair"] = package.repair
        return data


def examine() -> Report:
    """Look at this machine.  Imports onnxruntime and torch where they are installed."""
    packages = _packages()
    providers, problems = _providers()
    cuda, gpus, torch_problems = _torch()
    problems += torch_problems
    problems += find_problems(packages, providers, cuda, gpus, driver=_has_nvidia_driver())
    return Report(
        enginecast=__version__,
        python=sys.version.split()[0],
        platform=platform.platform(),
        cpu_features=cpu_features(Path("/proc/cpuinfo")),
        packages=packages,
        providers=providers,
        torch_cuda=cuda,
        gpus=gpus,
        problems=tuple(problems),
        torchscript=_torchscript(),
    )


def find_problems(
    packages: tuple[Package, ...],
    providers: tuple[str, ...],
    torch_cuda: str | None,
    gpus: tuple[Gpu, ...],
    *,
    driver: bool,
) -> list[Problem]:
    """What does not fit together in what was found."""
    found = {package.name: package for package in packages}
    with_gpu_build = _has(found, "onnxruntime-gpu")
    problems = [
        Problem(
            f"{package.name} {package.version or 'is missing'}, {package.wanted} is needed",
            package.repair,
        )
        for package in packages
        if not package.extra
        and not package.fits
        and not (package.name == "onnxruntime" and with_gpu_build)
    ]
    if _has(found, "onnxruntime") and with_gpu_build:
        keep = found["onnxruntime-gpu" if gpus else "onnxruntime"]
        problems.append(
            Problem(
                "onnxruntime and onnxruntime-gpu are both installed; they share their files",
                "pip uninstall -y onnxruntime onnxruntime-gpu"
                f" && pip install '{keep.name}{keep.wanted}'",
            )
        )
    elif gpus and providers and "CUDAExecutionProvider" not in providers:
        gpu = found.get("onnxruntime-gpu", Package("onnxruntime-gpu", "", None, "cuda"))
        problems.append(
            Problem("there is a CUDA GPU, but this ONNX Runtime runs on CPU only", gpu.repair)
        )
    if driver and _has(found, "torch") and torch_cuda is None:
        problems.append(
            Problem(
                "there is an NVIDIA driver, but this torch is a CPU build",
                f"pip install --force-reinstall '{found['torch'].name}{found['torch'].wanted}'",
            )
        )
    return problems


def cpu_features(cpuinfo: Path) -> dict[str, bool]:
    """Which of the features that matter an x86 CPU has; empty for other CPUs and systems."""
    if not cpuinfo.exists():
        return {}
    line = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    if line is None:
        return {}
    flags = set(line[1].split())
    return {name: bool(flags & wanted) for name, (wanted, _) in _CPU_FEATURES.items()}


def show(report: Report, console: Console) -> None:
    """Print the report for people."""
    console.print(f"enginecast {report.enginecast} on Python {report.python}, {report.platform}")
    console.print(_package_table(report.packages))
    for package in report.packages:
        if package.extra and not package.fits:
            console.print(
                f"to add '{package.extra}': {package.repair}", markup=False, soft_wrap=True
            )
    if report.cpu_features:
        console.print(_cpu_table(report.cpu_features))
    console.print(f"ONNX Runtime providers: {', '.join(report.providers) or 'none'}")
    if report.torchscript is not None:
        state = "there, deprecated by PyTorch since 2.11" if report.torchscript else "dropped"
        console.print(f"TorchScript in torch: {state}")
    for gpu in report.gpus:
        console.print(f"GPU: {gpu.name} ({gpu.arch}), {gpu.memory / 2**30:.0f} GiB")
    if not report.gpus:
        console.print(
            f"GPU: none that torch sees (torch's CUDA: {report.torch_cuda or 'CPU build'})"
        )
    for problem in report.problems:
        console.print(f"[bold red]problem[/]: {problem.what}")
        console.print(f"  {problem.repair}", markup=False, soft_wrap=True)
    if not report.problems:
        console.print("[bold green]no problems[/]")


def _package_table(packages: tuple[Package, ...]) -> Table:
    table = Table("package", "installed", "wanted", "for")
    for package in packages:
        needed_for = package.extra or "everything"
        table.add_row(package.name, package.version or "-", package.wanted, needed_for)
    return table


def _cpu_table(features: dict[str, bool]) -> Table:
    table = Table("CPU feature", "here", "gives")
    for name, present in features.items():
        table.add_row(name, "yes" if present else "no", _CPU_FEATURES[name][1])
    return table


def _packages() -> tuple[Package, ...]:
    """What this package's own metadata asks for, without the tools of its developers."""
    found = []
    for text in metadata.requires("enginecast") or []:
        requirement = _REQUIREMENT.match(text)
        if requirement is None or requirement["extra"] == _DEVELOPMENT:
            continue
        name, extra = requirement["name"], requirement["extra"] or ""
        found.append(Package(name, requirement["wanted"], _installed(name), extra))
    return tuple(found)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _providers() -> tuple[tuple[str, ...], list[Problem]]:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return (), []  # reported with the packages
    except (ImportError, OSError) as error:
        return (), [_broken("onnxruntime", error)]
    return tuple(onnxruntime.get_available_providers()), []


def _torch() -> tuple[str | None, tuple[Gpu, ...], list[Problem]]:
    try:
        import torch
    except ModuleNotFoundError:
        return None, (), []  # an engine runs without it; reported with the packages
    except (ImportError, OSError) as error:
        return None, (), [_broken("torch", error)]
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(device.name, f"sm{device.major}{device.minor}", device.total_memory))
    return torch.version.cuda, tuple(gpus), []


def _torchscript() -> bool | None:
    try:
        import torch
    except (ImportError, OSError):
        return None  # reported with the packages
    return all(callable(getattr(torch.jit, name, None)) for name in ("script", "trace", "load"))


def _broken(name: str, error: Exception) -> Problem:
    return Problem(
        f"{name} is installed but does not import: {error}", f"pip install --force-reinstall {name}"
    )


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _has(found: dict[str, Package], name: str) -> bool:
    return name in found and found[name].version is not None


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))
