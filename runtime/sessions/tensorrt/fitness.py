"""What a TensorRT engine requires of the machine that loads it, and whether this one meets it.

    {"tensorrt": "11.0.0.114", "cuda": "13", "driver": "580.95.05", "platform": "linux x86_64",
     "gpu": "sm90", "gpu_name": "NVIDIA H200", "hardware": "none", "version_compatible": "no"}

An engine holds code for one GPU and calls one TensorRT, unless it was built to be compatible with
others.  TensorRT notices some mismatches when it reads an engine, and warns of others; nothing here
depends on that, since all is compared before TensorRT sees a byte.
Source: https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/advanced.html
(version and hardware compatibility).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from enginecast.runtime.device.fitness import Needs, platform_here, refuse_misfit
from enginecast.runtime.device.gpu import Gpu
from enginecast.runtime.device.versions import numbers
from enginecast.runtime.sessions.tensorrt.library import RTX

AMPERE = 80
DEFAULT_COMPUTE = "8.0 8.6 8.9 12.0+"
"""What TensorRT-RTX builds for by default
(https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/inference-library/cpu-engines.html)."""
_OLDEST = {"fp8": "8.9", "nvfp4": "12.0", "mxfp8": "12.0"}
"""Compute capability of the oldest GPUs that have a format; older ones are left out of
the library's own choice without a word, and are refused where they are asked for (1.7.1)
(https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/getting-started/support-matrix.html)."""
_COMPUTE = re.compile(r"\d+\.\d\+?( \d+\.\d\+?)*")
_VERSION = re.compile(r"\d+(\.\d+)*(\+.*)?")
_KEYS: Mapping[str, Callable[[str], object]] = {
    "tensorrt": _VERSION.fullmatch,
    "cuda": _VERSION.fullmatch,
    "driver": _VERSION.fullmatch,
    "platform": str,
    "gpu": re.compile(r"sm\d+").fullmatch,
    "gpu_name": str,
    "hardware": ("none", "ampere+", "same-capability").__contains__,
    "version_compatible": ("yes", "no").__contains__,
}
"""What an engine has to say, and what is true of a value that can be read."""


def requirements(trt: Any, gpu: Gpu, *, hardware: str, version_compatible: bool) -> dict[str, str]:
    """The requirements of an engine built here."""
    compatible = "yes" if version_compatible else "no"
    return {**machine(trt, gpu), "hardware": hardware, "version_compatible": compatible}


def machine(trt: Any, gpu: Gpu) -> dict[str, str]:
    """This machine's values for the same names."""
    return {
        "tensorrt": str(trt.__version__),
        "cuda": gpu.cuda,
        "driver": gpu.driver,
        "platform": platform_here(),
        "gpu": gpu.arch,
        "gpu_name": gpu.name,
    }


def portable_requirements(trt: Any, capabilities: Sequence[str], quantized: str) -> dict[str, str]:
    """The requirements of an engine of TensorRT-RTX.

    Args:
        capabilities: compute capabilities that it was built for; empty: the library's own choice.
        quantized: the format of its quantized values, such as "fp8"; empty: it has none.
    """
    oldest = numbers(_OLDEST.get(quantized, "0.0"))
    own = [each for each in DEFAULT_COMPUTE.split() if numbers(each.rstrip("+")) >= oldest]
    return {RTX.name: str(trt.__version__), "compute": " ".join(capabilities or own)}


def require_portable_fit(trt: Any, gpu: Gpu, needs: Needs, name: str, instead: str) -> None:
    """Refuse an engine of TensorRT-RTX that was built with another version, or for other GPUs.

    Raises:
        MissingError: with both values, or for a requirement that is missing or not known.
    """
    known = {RTX.name: _VERSION.fullmatch, "compute": _COMPUTE.fullmatch}
    problems = list(_unclear(needs, known))
    if not problems and needs[RTX.name] != trt.__version__:
        problems.append(
            f"built with TensorRT-RTX {needs[RTX.name]}, and here is {trt.__version__}: a plan"
            " loads in the release that built it alone"
        )
    if not problems and not _is_built_for(numbers(gpu.capability), needs["compute"]):
        built = ", ".join(needs["compute"].split()).replace("+", " and newer")
        problems.append(
            f"built for compute capability {built}, and the {gpu.name} here has {gpu.capability}"
        )
    refuse_misfit(name, problems, instead)


def _is_built_for(here: tuple[int, ...], compute: str) -> bool:
    return any(
        here >= numbers(each.rstrip("+")) if each.endswith("+") else here == numbers(each)
        for each in compute.split()
    )


def require_fit(needs: Needs, here: Needs, name: str, instead: str) -> None:
    """Refuse an engine that was built for another machine.

    Args:
        needs: as the manifest says; a key that is missing or not known here is refused, too.
        here: what `machine` gives.
        instead: what would load here, as a sentence.
    """
    refuse_misfit(name, list(_unclear(needs, _KEYS)) or _differences(needs, here), instead)


def _unclear(needs: Needs, known: Mapping[str, Callable[[str], object]]) -> Iterator[str]:
    for key in needs:
        if key not in known:
            yield f"asks for {key} {needs[key]}, which this enginecast does not know"
    for key, is_readable in known.items():
        if key not in needs:
            yield f"does not say for which {key} it was built"
        elif not is_readable(needs[key]):
            yield f"says {key} {needs[key]!r}, which cannot be read"


def _differences(needs: Needs, here: Needs) -> Iterator[str]:
    built, found = needs["tensorrt"], here["tensorrt"]
    if needs["version_compatible"] == "no":
        loads = built == found
        rule = "a plan loads in the version that built it, unless it was built version compatible"
    else:
        loads = numbers(built)[:2] <= numbers(found)[:2]
        rule = "a version-compatible plan loads in that version and in newer ones"
    gpu, gpu_here = (f"{each['gpu_name']} ({each['gpu']})" for each in (needs, here))
    runs, why = {
        "none": (
            gpu == gpu_here,
            "its kernels were chosen for that GPU, and it was built without hardware compatibility",
        ),
        "same-capability": (
            needs["gpu"] == here["gpu"],
            "it was built for GPUs of the same compute capability",
        ),
        "ampere+": (
            int(here["gpu"].removeprefix("sm")) >= AMPERE,
            f"it was built for Ampere (sm{AMPERE}) and newer GPUs",
        ),
    }[needs["hardware"]]
    for fits, wanted, is_here, reason in (
        (loads, f"with TensorRT {built}", found, rule),
        (
            needs["cuda"] == here["cuda"],
            f"for CUDA {needs['cuda']}",
            f"CUDA {here['cuda']}",
            "its code calls libraries of that version",
        ),
        (
            numbers(needs["driver"]) <= numbers(here["driver"]),
            f"with driver {needs['driver']}",
            here["driver"],
            "an older driver may lack what its kernels call",
        ),
        (
            needs["platform"] == here["platform"],
            f"for {needs['platform']}",
            here["platform"],
            "it holds code for that platform",
        ),
        (runs, f"for {gpu}", gpu_here, why),
    ):
        if not fits:
            yield f"built {wanted}, and here is {is_here}: {reason}"
