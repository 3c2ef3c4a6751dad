"""What a TensorRT plan asks of the machine that loads it, and whether it is there.

    {"tensorrt": "11.0.0.114", "cuda": "13", "driver": "580.95.05", "platform": "linux x86_64",
     "gpu": "sm90", "gpu_name": "NVIDIA H200", "hardware": "none", "version_compatible": "no"}

A plan holds code for one GPU and calls one TensorRT, unless it was built to be compatible with
others.  TensorRT notices some mismatches when it reads a plan, and warns of others; nothing here
depends on that, since all is compared before TensorRT sees a byte.
Source: https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/advanced.html
(version and hardware compatibility).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from enginecast.errors import MissingError
from enginecast.runtime.device.fitness import platform_here

Needs = Mapping[str, str]
AMPERE = 80
_KEYS = (
    "tensorrt",
    "cuda",
    "driver",
    "platform",
    "gpu",
    "gpu_name",
    "hardware",
    "version_compatible",
)
_LEVELS = ("none", "ampere+", "same-capability")


class Device(Protocol):
    """A GPU, as `runtime.device.gpu.Gpu` describes it."""

    @property
    def name(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def driver(self) -> str: ...
    @property
    def cuda(self) -> str: ...


class Options(Protocol):
    """How a plan was built, as `exporters.tensorrt.options.TensorRTOptions` says it."""

    @property
    def version_compatible(self) -> bool: ...
    @property
    def hardware(self) -> str: ...


def requirements(trt: Any, gpu: Device, options: Options) -> dict[str, str]:
    """What a plan built here will ask for.

    Args:
        trt: the module tensorrt.
        gpu: on which it is built.
        options: of the build.
    """
    return {
        **machine(trt, gpu),
        "hardware": options.hardware,
        "version_compatible": "yes" if options.version_compatible else "no",
    }


def machine(trt: Any, gpu: Device) -> dict[str, str]:
    """What is here, by the same names."""
    return {
        "tensorrt": str(trt.__version__),
        "cuda": gpu.cuda,
        "driver": gpu.driver,
        "platform": platform_here(),
        "gpu": gpu.arch,
        "gpu_name": gpu.name,
    }


def require_fit(needs: Needs, here: Needs, name: str, instead: str) -> None:
    """Refuse a plan that was built for another machine.

    Args:
        needs: as the manifest says; a key that is not known here is refused, and a key that is
            lacking, too.
        here: what `machine` gives.
        name: of the file, for the message.
        instead: what would load here, as a sentence.

    Raises:
        MissingError: says what the plan was built for and what is here, each in one sentence.
    """
    problems = list(_problems(needs, here))
    if problems:
        raise MissingError("; ".join(f"{name}: {problem}" for problem in problems), hint=instead)


def _problems(needs: Needs, here: Needs) -> Iterator[str]:
    unknown = [f"asks for {key} {needs[key]}" for key in needs if key not in _KEYS]
    yield from (f"{text}, which this enginecast does not know" for text in unknown)
    lacking = [key for key in _KEYS if key not in needs]
    yield from (f"does not say for which {key} it was built" for key in lacking)
    unreadable = [key for key, read in _READERS.items() if key in needs and not read(needs[key])]
    yield from (f"says {key} {needs[key]!r}, which cannot be read" for key in unreadable)
    if unknown or lacking or unreadable:
        return
    for rule in (_tensorrt, _cuda, _driver, _platform, _gpu):
        yield from rule(needs, here)


def _tensorrt(needs: Needs, here: Needs) -> Iterator[str]:
    built, found = needs["tensorrt"], here["tensorrt"]
    if needs["version_compatible"] == "no":
        if built != found:
            yield (
                f"built with TensorRT {built}, and here is {found}: a plan loads in the version"
                " that built it, unless it was built version compatible"
            )
    elif _numbers(built)[:2] > _numbers(found)[:2]:
        yield (
            f"built with TensorRT {built}, and here is {found}: a version-compatible plan loads"
            " in that version and in newer ones"
        )


def _cuda(needs: Needs, here: Needs) -> Iterator[str]:
    if needs["cuda"] != here["cuda"]:
        yield (
            f"built for CUDA {needs['cuda']}, and here is CUDA {here['cuda']}: its code calls"
            " libraries of that version"
        )


def _driver(needs: Needs, here: Needs) -> Iterator[str]:
    if _numbers(here["driver"]) < _numbers(needs["driver"]):
        yield (
            f"built with driver {needs['driver']}, and here is {here['driver']}: an older driver"
            " may lack what its kernels call"
        )


def _platform(needs: Needs, here: Needs) -> Iterator[str]:
    if needs["platform"] != here["platform"]:
        yield (
            f"built for {needs['platform']}, and here is {here['platform']}: it holds code for"
            " that platform"
        )


def _gpu(needs: Needs, here: Needs) -> Iterator[str]:
    level = needs["hardware"]
    built = f"{needs['gpu_name']} ({needs['gpu']})"
    found = f"{here['gpu_name']} ({here['gpu']})"
    if level == "none" and (needs["gpu"], needs["gpu_name"]) != (here["gpu"], here["gpu_name"]):
        yield (
            f"built for {built}, and here is {found}: its kernels were chosen for that GPU, and it"
            " was built without hardware compatibility"
        )
    if level == "same-capability" and needs["gpu"] != here["gpu"]:
        yield (
            f"built for {built}, and here is {found}: it was built for GPUs of the same compute"
            " capability"
        )
    if level == "ampere+" and _capability(here["gpu"]) < AMPERE:
        yield (
            f"built for {built}, and here is {found}: it was built for Ampere (sm{AMPERE}) and"
            " newer GPUs"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of "11.0.0.114"; none when there is something else in it."""
    plain = version.split("+")[0]
    if not re.fullmatch(r"\d+(\.\d+)*", plain):
        return ()
    return tuple(int(part) for part in plain.split("."))


def _capability(arch: str) -> int:
    """90 of "sm90"; 0 when it is something else."""
    found = re.fullmatch(r"sm(\d+)", arch)
    return int(found[1]) if found else 0


_READERS: Mapping[str, Callable[[str], object]] = {
    "tensorrt": _numbers,
    "cuda": _numbers,
    "driver": _numbers,
    "gpu": _capability,
    "hardware": _LEVELS.__contains__,
    "version_compatible": ("yes", "no").__contains__,
}
"""What must be readable, and what reads it."""
