"""What ahead-of-time compiled code requires of a machine, and whether this one meets it.

{"torch": "2.13", "platform": "linux x86_64", "cpu": "avx512 avx512_vnni"}
{..., "cuda": "13", "gpu": "sm90"}                    of code for a GPU
"""

import platform
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from enginecast.errors import MissingError
from enginecast.runtime.device.gpu import arch_of, cuda_major
from enginecast.runtime.device.versions import short_version

Needs = Mapping[str, str]
_WHY = {
    "torch": "its code calls functions of that version",
    "platform": "it is machine code for that platform",
    "cpu": "it was compiled for these instructions",
    "cuda": "its code calls libraries of that CUDA version",
    "gpu": "its kernels were compiled for that GPU",
}
_PARTS: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512_f", "avx512_dq", "avx512_vl", "avx512_bw", "fma3"),
    "avx2": ("avx2", "fma3", "f16c"),
    "asimd": ("neon",),
}
"""What Inductor means by one of its names, in those of torch.cpu.get_capabilities()."""
_LEVELS = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}


def requirements(torch: Any, device: str, isa: str) -> dict[str, str]:
    """The requirements of code compiled on this machine.

    Args:
        isa: the vector instructions that the compiler may use, as Inductor calls them:
            "avx512 avx512_vnni".
    """
    found = {"torch": short_version(torch.__version__), "platform": platform_here(), "cpu": isa}
    if device == "cuda":
        found |= {"cuda": cuda_major(torch), "gpu": arch_of(torch)}
    return found


def require_fit(torch: Any, needs: Needs, name: str) -> None:
    """Refuse code that was made for another machine; a key that is not known here, too.

    Raises:
        MissingError: says what is needed and what is here, each in one sentence.
    """
    here = {"torch": short_version(torch.__version__), "platform": platform_here()}
    if "gpu" in needs:
        here |= {"cuda": cuda_major(torch), "gpu": arch_of(torch)}
    problems = []
    for key, wanted in needs.items():
        if key == "cpu":
            if lacking := ", ".join(part for part in wanted.split() if not _has(torch, part)):
                problems.append(
                    f"made for a CPU with {wanted}, and this one lacks {lacking}: {_WHY[key]}"
                )
        elif key not in here:
            problems.append(f"asks for {key} {wanted}, which this enginecast does not know")
        elif here[key] != wanted:
            problems.append(f"made for {key} {wanted}, and here is {here[key]}: {_WHY[key]}")
    hint = "Use it on a machine like the one that it was made on, or export the model here."
    refuse_misfit(name, problems, hint)


def refuse_misfit(name: str, problems: Iterable[str], hint: str) -> None:
    """A MissingError with a sentence for each requirement of a file that this machine lacks."""
    if found := "; ".join(f"{name}: {problem}" for problem in problems):
        raise MissingError(found, hint=hint)


def _has(torch: Any, part: str) -> bool:
    """Whether this CPU has one of Inductor's sets of instructions."""
    known = getattr(torch.cpu, "get_capabilities", None)
    if known is not None:
        capabilities = known()
        return all(bool(capabilities.get(name)) for name in _PARTS.get(part, (part,)))
    # Before torch 2.12 there is but the level that its own kernels use.
    level = _LEVELS.get(torch.backends.cpu.get_cpu_capability(), 0)
    return level >= (2 if "512" in part else _LEVELS.get(part.upper(), 3))


def platform_here() -> str:
    return f"{sys.platform} {platform.machine()}"
