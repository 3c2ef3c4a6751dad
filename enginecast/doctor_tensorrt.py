"""What there is of TensorRT: whether its Python modules import, and whether they go together."""

import os
import subprocess
import sys
from importlib.util import find_spec

from enginecast.doctor_report import Library, Problem, TensorRT
from enginecast.errors import MissingError
from enginecast.runtime.gpu import driver_version
from enginecast.runtime.tensorrt_library import short_version
from enginecast.runtime.tensorrt_versions import Pair, check_pair, known_pairs

MODULES = ("tensorrt", "torch_tensorrt")
_SECONDS = 120.0
_PRINT_VERSION = "import {0}, sys; sys.stdout.write('\\n' + {0}.__version__)"
_CUDA_WHEELS = "https://download.pytorch.org/whl/cu{}0"


def examine_tensorrt(torch_version: str | None, torch_cuda: str | None) -> TensorRT:
    """Import each module in a process of its own, so that no crash of theirs is one of ours.

    Args:
        torch_version: None: there is no torch, and nothing is compared with it.
        torch_cuda: the CUDA version that it was built for; None: a CPU build.
    """
    libraries = tuple(_library(name) for name in MODULES)
    tensorrt, torch_tensorrt = (one.version for one in libraries)
    wrong: list[str] = []
    if torch_version is not None and (tensorrt or torch_tensorrt):
        wrong = check_pair(torch_version, torch_tensorrt, tensorrt, cuda=torch_cuda)
    return TensorRT(libraries, driver(), tuple(wrong))


def tensorrt_problems(
    found: TensorRT, torch_version: str | None, torch_cuda: str | None
) -> list[Problem]:
    """What does not work of what is installed; that nothing is, is no problem."""
    if not any(one.installed for one in found.libraries):
        return []
    pair = _pair(torch_version)
    problems = [
        Problem(
            f"{one.name} is installed but does not import: {one.reason}", _install(pair, "--force")
        )
        for one in found.libraries
        if one.installed and one.version is None
    ]
    problems += [Problem(sentence, _repair(sentence, pair)) for sentence in found.wrong]
    if found.driver is None:
        problems.append(
            Problem(
                "TensorRT is installed, and there is no NVIDIA driver",
                "install NVIDIA's driver, or hand the GPU into this container (--gpus all)",
            )
        )
    elif torch_version is not None and torch_cuda is None and pair is not None:
        problems.append(
            Problem("TensorRT is installed, and this torch is a CPU build", _torch_for(pair))
        )
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
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_VERSION.format(name)],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
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


def _repair(sentence: str, pair: Pair | None) -> str:
    return _torch_for(pair) if pair is not None and "for CUDA" in sentence else _install(pair)


def _install(pair: Pair | None, option: str = "") -> str:
    if pair is None:
        newest = known_pairs()[-1]
        return f"pip install 'torch=={newest.torch}.*' 'torch-tensorrt=={newest.torch_tensorrt}.*'"
    force = "--force-reinstall " if option else ""
    return (
        f"pip install {force}'torch-tensorrt=={pair.torch_tensorrt}.*'"
        f" 'tensorrt-cu{pair.cuda}=={pair.tensorrt}.*'"
    )


def _torch_for(pair: Pair) -> str:
    wheels = _CUDA_WHEELS.format(pair.cuda)
    return f"pip install --force-reinstall 'torch=={pair.torch}.*' --index-url {wheels}"
