"""NVIDIA's two libraries of the TensorRT API: imported on demand, and checked for the names that we
call.

`api.json` lists those names for each version that this was written for; it was written by
hand from NVIDIA's public API reference.  TensorRT-RTX 1.7 has those of TensorRT 11.0 and some more.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from typing import Any

from enginecast.errors import MissingError, first_line
from enginecast.installation import install_command
from enginecast.runtime.device.versions import numbers, short_version

Names = Mapping[str, tuple[str, ...]]
"""Class or module -> the methods, properties, enum members and the like of it that are called."""


@dataclass(frozen=True)
class Library:
    """One of the two."""

    name: str
    """Of its target, of its session and of the extra that installs it."""
    title: str
    """As NVIDIA calls it."""
    module: str
    oldest: str
    """Version that this was written for."""
    like: str = ""
    """The version of TensorRT that has the names of all its versions; empty: it is TensorRT."""
    builds_without_gpu: bool = False
    has_plugins: bool = False
    """Whether operators have plugins, such as RoiAlign's."""

    def version(self, trt: Any) -> str:
        """Such as "TensorRT-RTX 1.7.1.116"."""
        return f"{self.title} {trt.__version__}"


TENSORRT = Library("tensorrt", "TensorRT", "tensorrt", "10.15", has_plugins=True)
RTX = Library(
    "tensorrt-rtx",
    "TensorRT-RTX",
    "tensorrt_rtx_bindings",  # the package tensorrt-rtx imports it, and is built from source
    "1.7",
    like="11.0",
    builds_without_gpu=True,
)


def library_of(trt: Any) -> Library:
    """The library that a module is."""
    return RTX if trt.__name__.startswith("tensorrt_rtx") else TENSORRT


@cache
def known_apis() -> Mapping[str, Names]:
    """The names that are called, by TensorRT's version: "10.15", "11.0"."""
    return {
        version: {name: tuple(members) for name, members in classes.items()}
        for version, classes in read_table("api.json")["versions"].items()
    }


@cache
def read_table(name: str) -> Any:
    """A JSON file that lies beside this one."""
    folder = resources.files("enginecast.runtime.sessions.tensorrt")
    return json.loads(folder.joinpath(name).read_text("utf-8"))


def import_tensorrt(why: str, library: Library = TENSORRT) -> Any:
    """The module of a library, of a version that has all that is called.

    Args:
        why: what needs it, for the message: "engine.plan: a TensorRT engine".

    Raises:
        MissingError: it is not installed, does not load, or lacks names.
    """
    hint = "Its libraries come in tensorrt-cu13-libs; see `enginecast doctor`."
    trt = import_library(
        library.module, why, hint.replace("tensorrt-", f"{library.name}-"), library
    )
    if numbers(short_version(trt.__version__)) < numbers(library.oldest):
        raise MissingError(
            f"{why}: {library.version(trt)}: expected at least {library.oldest}",
            hint=_install(library),
        )
    names = names_for(library.like or short_version(trt.__version__))
    lacking = missing_names(trt, names)
    if lacking:
        known = " and ".join(known_apis()) if library is TENSORRT else library.oldest
        raise MissingError(
            f"{why}: {library.version(trt)} lacks {', '.join(lacking[:5])}",
            hint=f"Supported: {known}, and newer ones that keep these names.",
        )
    return trt


def import_library(name: str, why: str, hint: str, library: Library = TENSORRT) -> Any:
    """A module that `why` needs; `hint` is for one that is installed and does not load."""
    shown = library.name if name == library.module else name
    try:
        return import_module(name)
    except Exception as error:  # torch_tensorrt asks CUDA for the GPU while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise MissingError(
                f"{why} needs {shown}, which is not installed", hint=_install(library)
            ) from error
        raise MissingError(
            f"{why} needs {shown}, which is installed but does not load: {first_line(error)}",
            hint=hint,
        ) from error


def _install(library: Library = TENSORRT) -> str:
    command = install_command(library.name)
    return command if library.builds_without_gpu else f"{command} on Linux with an NVIDIA GPU"


def names_for(version: str) -> Names:
    """The names that are called of this version of TensorRT; those of the newest known one before
    it.
    """
    known = {numbers(found): names for found, names in known_apis().items()}
    older = [found for found in known if found <= numbers(short_version(version))]
    return known[max(older)]


def missing_names(trt: Any, names: Names) -> list[str]:
    """What a module lacks of the names, as "Builder.create_network"."""
    found = []
    for name, members in names.items():
        owner = getattr(trt, name, None)
        if owner is None:
            found.append(name)
        else:
            found += [f"{name}.{member}" for member in members if not hasattr(owner, member)]
    return found
