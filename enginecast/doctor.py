"""What this machine has, what it lacks for which purpose, and the command that repairs it."""

import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from enginecast import __version__
from enginecast.doctor_report import CPU_FEATURES, Gpu, Package, Problem, Report
from enginecast.doctor_tensorrt import examine_tensorrt, tensorrt_problems

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?P<parts>\[[\w,-]+\])?\s*(?P<wanted>[^;\s]*)"
    r"(?:.*extra == ['\"](?P<extra>\w+))?"
)
_DEVELOPMENT = "dev"


def examine(*, tensorrt: bool = False) -> Report:
    """Look at this machine.  Imports onnxruntime and torch where they are installed.

    Args:
        tensorrt: import TensorRT's modules, too, which takes seconds where they are installed.
    """
    packages = _packages()
    providers, problems = _providers()
    cuda, gpus, torch_problems = _torch()
    problems += torch_problems
    problems += find_problems(packages, providers, cuda, gpus, driver=_has_nvidia_driver())
    found = None
    if tensorrt:
        torch = _installed("torch")
        found = examine_tensorrt(torch, cuda)
        problems += tensorrt_problems(found, torch, cuda)
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
        tensorrt=found,
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
    return {name: bool(flags & wanted) for name, (wanted, _) in CPU_FEATURES.items()}


def _packages() -> tuple[Package, ...]:
    """What this package's own metadata asks for, without the tools of its developers."""
    found = []
    for text in metadata.requires("enginecast") or []:
        requirement = _REQUIREMENT.match(text)
        if requirement is None or requirement["extra"] == _DEVELOPMENT:
            continue
        name, extra = requirement["name"], requirement["extra"] or ""
        parts, wanted = requirement["parts"] or "", requirement["wanted"]
        found.append(Package(name, wanted, _installed(name), extra, parts))
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
