"""What this machine has, what is missing for which purpose, and the command that repairs it."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enginecast.doctor.imports import broken_libraries
from enginecast.errors import MissingError
from enginecast.installation import install_command, unimportable
from enginecast.runtime.device.gpu import driver_version
from enginecast.runtime.device.versions import installed, numbers, short_version
from enginecast.runtime.sessions.tensorrt.library import RTX
from enginecast.runtime.sessions.tensorrt.versions import Pair, check_pair, known_pairs
from enginecast.version import __version__

# Feature -> the flags of /proc/cpuinfo, any of which gives it, and what it is good for here.
CPU_FEATURES = {
    "avx2": ({"avx2"}, "fp32 kernels at full width"),
    "avx512": ({"avx512f"}, "fp32 kernels at double width"),
    "vnni": ({"avx512_vnni", "avx_vnni"}, "int8 engines faster than fp32"),
    "avx512_bf16": ({"avx512_bf16"}, "bf16 in torch at speed"),
    "amx_bf16": ({"amx_bf16"}, "bf16 matrix products in torch at speed"),
    "amx_int8": ({"amx_int8"}, "int8 matrix products at speed"),
}
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?P<parts>\[[\w,-]+\])?\s*(?P<wanted>[^;\s]*)"
    r"(?:.*extra == ['\"](?P<extra>\w+))?"
)
_DEVELOPMENT = {"bench", "dev", "docs", "release"}
"""Extras for work on this package itself."""
_SCRIPT = ("script", "trace", "load")
"""What TorchScript is used for."""
MODULES = ("tensorrt", "torch_tensorrt", RTX.module)
_SECONDS = 120.0
_PRINT_VERSION = "import {0}, sys; sys.stdout.write('\\n' + {0}.__version__)"
_CUDA_WHEELS = "https://download.pytorch.org/whl/cu{}0"


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
        return minimum is None or numbers(self.version) >= numbers(minimum[1])

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
    """Versions that do not fit one another, in sentences."""


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
    problems: tuple[Problem, ...] = ()
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


def examine(*, imports: bool = False) -> Report:
    """Look at this machine.  Imports onnxruntime and torch where they are installed.

    Args:
        imports: import the other libraries, too, in processes of their own; takes seconds.
    """
    packages = _packages()
    with ThreadPoolExecutor(max_workers=1) as beside:
        broken = beside.submit(broken_libraries) if imports else None
        onnxruntime, problems = _import("onnxruntime")
        torch, torch_problems = _import("torch")
    providers = tuple(onnxruntime.get_available_providers()) if onnxruntime else ()
    cuda = torch.version.cuda if torch else None
    gpus = tuple(_gpus(torch)) if torch else ()
    problems += torch_problems
    problems += find_problems(packages, providers, cuda, gpus, driver=_has_nvidia_driver())
    found = None
    if broken is not None:
        problems += [Problem(one.message, one.hint) for one in broken.result()]
        version = installed("torch").get("torch")
        found = examine_tensorrt(version, cuda)
        problems += tensorrt_problems(found, version, cuda)
    script = [getattr(torch.jit, name, None) for name in _SCRIPT] if torch else []
    return Report(
        enginecast=__version__,
        python=sys.version.split()[0],
        platform=platform.platform(),
        cpu_features=cpu_features(Path("/proc/cpuinfo")),
        packages=packages,
        providers=providers,
        torch_cuda=cuda,
        gpus=gpus,
        problems=tuple(dict.fromkeys(problems)),
        torchscript=all(map(callable, script)) if torch else None,
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
    """Versions and builds that do not fit one another, and what is missing."""
    found = {package.name: package for package in packages}
    with_gpu_build = _has(found, "onnxruntime-gpu")
    unneeded = "onnxruntime" if with_gpu_build else None
    problems = [
        Problem(f"{one.name} {one.version or 'is missing'}, {one.wanted} is needed", one.repair)
        for one in packages
        if not (one.fits or one.name == unneeded or (one.extra and one.version is None))
    ]
    if _has(found, "onnxruntime") and with_gpu_build:
        keep = found["onnxruntime-gpu" if gpus else "onnxruntime"]
        what = "onnxruntime and onnxruntime-gpu are both installed; they share their files"
        uninstall = "pip uninstall -y onnxruntime onnxruntime-gpu"
        problems.append(Problem(what, f"{uninstall} && pip install '{keep.name}{keep.wanted}'"))
    elif gpus and providers and "CUDAExecutionProvider" not in providers:
        gpu = found.get("onnxruntime-gpu", Package("onnxruntime-gpu", "", None, "cuda"))
        what = "there is a CUDA GPU, but this ONNX Runtime runs on CPU only"
        problems.append(Problem(what, gpu.repair))
    if driver and _has(found, "torch") and torch_cuda is None:
        repair = f"pip install --force-reinstall 'torch{found['torch'].wanted}'"
        what = "there is an NVIDIA driver, but this torch is a CPU build"
        problems.append(Problem(what, repair))
    return problems


def outdated() -> MissingError | None:
    """What to raise where an installed library is too old for this package; None: none is."""
    old = [one for one in _packages() if one.version is not None and not one.fits]
    if not old:
        return None
    found = ", ".join(f"{one.name}{one.wanted}, found {one.version}" for one in old)
    repair = " ".join(f"'{one.name}{one.wanted}'" for one in old)
    return MissingError(f"enginecast needs {found}", hint=f"pip install --upgrade {repair}")


def cpu_class() -> str:
    """This machine's vector instructions in a word: "AVX512-VNNI", "AVX2"; empty: unknown."""
    found = cpu_features(Path("/proc/cpuinfo"))
    width = next((name for name in ("avx512", "avx2") if found.get(name)), "")
    return f"{width.upper()}{'-VNNI' if width and found['vnni'] else ''}"


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
    """What this package's own metadata asks for, without the tools of its developers; nothing
    where it runs from a folder and is not installed.
    """
    found, texts = [], list[str]()
    with suppress(metadata.PackageNotFoundError):
        texts = metadata.requires("enginecast") or []
    for text in texts:
        requirement = _REQUIREMENT.match(text)
        if requirement is None or requirement["extra"] in _DEVELOPMENT:
            continue
        if requirement["name"] == "enginecast":  # an extra that includes another one
            continue
        name, extra = requirement["name"], requirement["extra"] or ""
        parts, wanted = requirement["parts"] or "", requirement["wanted"]
        found.append(Package(name, wanted, installed(name).get(name), extra, parts))
    return tuple(found)


def _import(name: str) -> tuple[Any, list[Problem]]:
    """A module; None where it is not installed (reported with the packages) or does not import."""
    try:
        return import_module(name), []
    except Exception as error:
        broken = unimportable(error)
        return None, [Problem(broken.message, broken.hint)] if broken else []


def _gpus(torch: Any) -> Iterator[Gpu]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        yield Gpu(device.name, f"sm{device.major}{device.minor}", device.total_memory)


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _has(found: dict[str, Package], name: str) -> bool:
    return name in found and found[name].version is not None


def examine_tensorrt(torch_version: str | None, torch_cuda: str | None) -> TensorRT:
    """Import each module in a process of its own, so that no crash of theirs is one of ours."""
    libraries = tuple(_library(name) for name in MODULES)
    tensorrt, torch_tensorrt, _ = (one.version for one in libraries)
    wrong: list[str] = []
    if torch_version is not None and (tensorrt or torch_tensorrt):
        wrong = check_pair(torch_version, torch_tensorrt, tensorrt, cuda=torch_cuda)
    return TensorRT(libraries, driver(), tuple(wrong))


def tensorrt_problems(
    found: TensorRT, torch_version: str | None, torch_cuda: str | None
) -> list[Problem]:
    """What does not work of what is installed; that nothing is, is not a problem."""
    pair = _pair(torch_version)
    problems = [
        Problem(
            f"{one.name} is installed but does not import: {one.reason}",
            install_command(RTX.name) if one.name == RTX.module else _install(pair, force=True),
        )
        for one in found.libraries
        if one.installed and one.version is None
    ]
    if not any(one.installed for one in found.libraries if one.name != RTX.module):
        return problems  # TensorRT-RTX builds without a GPU
    for sentence in found.wrong:
        repair = _torch_for(pair) if pair and "for CUDA" in sentence else _install(pair)
        problems.append(Problem(sentence, repair))
    if found.driver is None:
        repair = "install NVIDIA's driver, or hand the GPU into this container (--gpus all)"
        problems.append(Problem("TensorRT is installed, and there is no NVIDIA driver", repair))
    elif torch_version is not None and torch_cuda is None and pair is not None:
        what = "TensorRT is installed, and this torch is a CPU build"
        problems.append(Problem(what, _torch_for(pair)))
    return problems


def driver() -> str | None:
    """The version of NVIDIA's driver, such as "580.95.05"; None without one."""
    try:
        return driver_version()
    except MissingError:
        return None


def _library(name: str) -> Library:
    if find_spec(name) is None:
        return Library(name, None, installed=False)
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", _PRINT_VERSION.format(name)]
    env = {**os.environ, "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        reason = f"it was not done after {_SECONDS:.0f} seconds"
        return Library(name, None, installed=True, reason=reason)
    if done.returncode == 0:
        return Library(name, done.stdout.splitlines()[-1], installed=True)
    said = done.stderr.strip().splitlines()
    reason = said[-1] if said else f"the process ended with {done.returncode}"
    return Library(name, None, installed=True, reason=reason)


def _pair(torch_version: str | None) -> Pair | None:
    """What goes with this torch; with none, the newest pair."""
    if torch_version is None:
        return known_pairs()[-1]
    short = short_version(torch_version)
    return next((pair for pair in known_pairs() if pair.torch == short), None)


def _install(pair: Pair | None, *, force: bool = False) -> str:
    if pair is None:
        newest = known_pairs()[-1]
        return f"pip install 'torch=={newest.torch}.*' 'torch-tensorrt=={newest.torch_tensorrt}.*'"
    command = "pip install --force-reinstall" if force else "pip install"
    library = f"tensorrt-cu{pair.cuda}=={pair.tensorrt}.*"
    return f"{command} 'torch-tensorrt=={pair.torch_tensorrt}.*' '{library}'"


def _torch_for(pair: Pair) -> str:
    wheels = _CUDA_WHEELS.format(pair.cuda)
    return f"pip install --force-reinstall 'torch=={pair.torch}.*' --index-url {wheels}"
