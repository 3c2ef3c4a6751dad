"""The installed TensorRT: imported on demand, and checked for the names that we call.

`api.json` lists those names for each version that this was written for; it was written by
hand from NVIDIA's public API reference.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import import_module, resources
from typing import Any

from enginecast.errors import MissingError, first_line
from enginecast.installation import install_command
from enginecast.runtime.device.versions import numbers, short_version

Names = Mapping[str, tuple[str, ...]]
"""Class or module -> the methods, properties, enum members and the like of it that are called."""


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


def import_tensorrt(why: str) -> Any:
    """The module tensorrt, of a version that has all that is called.

    Args:
        why: what needs it, for the message: "engine.plan: a TensorRT engine".
    """
    trt = import_library(
        "tensorrt", why, "Its libraries come in tensorrt-cu13-libs; see `enginecast doctor`."
    )
    version = short_version(trt.__version__)
    lacking = missing_names(trt, names_for(version))
    if lacking:
        raise MissingError(
            f"{why}: tensorrt {trt.__version__} lacks {', '.join(lacking[:5])}",
            hint=f"Supported: {' and '.join(known_apis())}, and newer ones that keep these names.",
        )
    return trt


def import_library(name: str, why: str, hint: str) -> Any:
    """A module that `why` needs; `hint` is for one that is installed and does not load."""
    try:
        return import_module(name)
    except Exception as error:  # torch_tensorrt asks CUDA for the GPU while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise MissingError(
                f"{why} needs {name}, which is not installed", hint=_install()
            ) from error
        raise MissingError(
            f"{why} needs {name}, which is installed but does not load: {first_line(error)}",
            hint=hint,
        ) from error


def _install() -> str:
    return f"{install_command('tensorrt')} on Linux with an NVIDIA GPU"


def names_for(version: str) -> Names:
    """The names that are called of this version; those of the newest known one before it."""
    known = {numbers(found): names for found, names in known_apis().items()}
    older = [found for found in known if found <= numbers(short_version(version))]
    if not older:
        raise MissingError(
            f"tensorrt {version}: expected at least {min(known_apis(), key=numbers)}",
            hint=_install(),
        )
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


def newest_version() -> str:
    """The newest version that this was written for: "11.0"."""
    return max(known_apis(), key=numbers)
