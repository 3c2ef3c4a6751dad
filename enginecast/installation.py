"""How this package was installed, which extra brings which library, and what to do where a library
is missing or does not import.
"""

import json
import re
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from enginecast.errors import EnginecastError, MissingError, first_line

OURS = "enginecast"
EXTRAS = {
    "torch": "export",
    "sympy": "export",
    "transformers": "export",
    "huggingface_hub": "export",
    "onnx": "export",
    "onnxscript": "export",
    "onnx_ir": "export",
    "jinja2": "export",
    "diffusers": "diffusers",
    "accelerate": "diffusers",
    "pyarrow": "cache",
    "datasets": "cache",
    "ray": "ray",
    "model_signing": "signing",
    "openvino": "openvino",
    "torch_tensorrt": "tensorrt",
    "tensorrt_rtx_bindings": "tensorrt-rtx",
}
"""Libraries by the names that they are imported under."""
BUILT_FOR_TORCH = {"torchvision": (0, 15), "torchaudio": (2, 0)}
"""Torch 2.N goes with version 0.(N + 15) of torchvision."""
_NO_CUDA = (
    "torch not compiled with cuda enabled",
    "pytorch is not linked with support for cuda",
    "found no nvidia driver",
    "no cuda gpus are available",
    "no cuda-capable device",
    "cuda driver initialization failed",
)
_REQUIREMENT = re.compile(r"([\w.-]+(?:\[[\w,-]+\])?)\s*\(?([^;\s)]*)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)")


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation, from where the installation came.

    That is the checkout that runs, or the folder, file or URL that pip recorded (PEP 610).  Where
    nothing is known of it, or it is gone, the command lists what the extra brings.
    """
    source, editable = _source()
    if not source:
        return f"pip install {' '.join(map(shlex.quote, _requirements(extra)))}"
    wanted = f"{OURS}[{extra}] @ {source}" if "://" in source else f"{source}[{extra}]"
    return f"pip install {'--editable ' if editable else ''}{shlex.quote(wanted)}"


@contextmanager
def required(library: str, doing: str, extra: str, *, instead: str = "") -> Iterator[None]:
    """Import a library of an extra within.

    Args:
        doing: what needs it, such as "a parquet file".
        instead: what else the user could do, such as "or --format npz".

    Raises:
        MissingError: it is not installed, or does not import.
    """
    try:
        yield
    except Exception as error:  # a library may raise anything while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            command = install_command(extra)
            raise MissingError(
                f"{doing} needs {library}, which is not installed",
                hint=f"{command}, {instead}." if instead else command,
            ) from error
        raise unimportable(error) or MissingError(
            f"{doing} needs {library}, which is installed but does not import: {first_line(error)}"
        ) from error


@contextmanager
def needing(doing: str) -> Iterator[None]:
    """Raise a MissingError where a library that is imported here is missing or broken.

    Args:
        doing: what needs it, such as "enginecast.load".
    """
    try:
        yield
    except Exception as error:
        lacking = unavailable(error, doing)
        if lacking is None:
            raise
        raise lacking from error


def unavailable(error: BaseException, doing: str) -> MissingError | None:
    """What to raise for a library that is missing or does not import; None: it was something else.

    Args:
        doing: what needs it, such as "enginecast export".
    """
    return missing(error, doing) or unimportable(error)


def missing(error: BaseException, doing: str) -> MissingError | None:
    """What to raise for a library of ours that is not installed; None: it was something else."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    always = _always()
    if error.name in EXTRAS:
        command = install_command(EXTRAS[error.name])
    elif error.name in always:
        command = f"pip install {shlex.quote(always[error.name])}"
    else:
        return None
    return MissingError(f"{doing} needs {error.name}, which is not installed", hint=command)


def unimportable(error: BaseException) -> MissingError | None:
    """What to raise for an installed library that raised while it was imported; None: none did.

    The innermost module that was being imported is to blame, whatever the libraries in between made
    of its exception.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>":
            module = str(frame.f_globals.get("__name__", ""))
    top = module.partition(".")[0]
    if top != "numpy" and first_line(error).startswith("numpy."):  # extensions in C say no more
        try:
            import_module("numpy")
        except Exception as behind:
            return unimportable(behind)
    if top in ("", "__main__", OURS):
        return None
    name = next(iter(metadata.packages_distributions().get(top, ())), "")
    if not name:
        return MissingError(f"the module {top} does not import: {_said(error)}")
    found = MissingError(
        f"{name} {metadata.version(name)} is installed but does not import: {_said(error)}"
        f"{_other_torch(name)}",
        hint=_repair(name, error),
    )
    found.details = {"library": name}
    return found


def missing_requirement(error: BaseException, who: str) -> EnginecastError | None:
    """The error to raise when the code of `who` wants what is not here; None: another cause."""
    for link in chain_of(error):
        if any(phrase in str(link).lower() for phrase in _NO_CUDA) and not _has_gpu():
            return MissingError(
                f"{who} needs a CUDA GPU, and this machine has none: {link}",
                hint="Build the model on the CPU; --device sets what the engine runs on.",
            )
        if isinstance(link, ModuleNotFoundError) and link.name:
            return MissingError(
                f"{who} needs the package {link.name.partition('.')[0]!r}, which is not installed",
                hint="Install it in this environment.",
            )
    return None


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised from."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _said(error: BaseException) -> str:
    """An exception in one line, without what numpy's or torch's advice adds to it."""
    return f"{type(error).__name__}: {first_line(error)}"


def _other_torch(name: str) -> str:
    """With which torch a library is here; empty for one that does not need it."""
    wanted = dict(_parsed(name)).get("torch")
    here = _version("torch")
    if wanted is None or name == "torch":
        return ""
    built = f"it needs torch{wanted}, and " if wanted else ""
    return f"; {built}torch {here} is installed" if here else f"; {built}torch is not installed"


def _repair(name: str, error: BaseException) -> str:
    """The command that makes a library importable."""
    if isinstance(error, ModuleNotFoundError):
        return f"Install what has the module {error.name}; `pip check` lists what packages lack."
    if versions := re.match(
        r"(\S+[<>=]\S+) is required", first_line(error)
    ):  # in transformers' words
        return f"pip install '{versions[1]}'"
    torch = re.match(r"2\.(\d+)[^+]*\+?(\w*)", _version("torch") or "")
    wanted, wheels = name, ""
    if torch and name in BUILT_FOR_TORCH:
        major, first = BUILT_FOR_TORCH[name]
        wanted = f"'{name}=={major}.{int(torch[1]) + first}.*'"
        wheels = f" --index-url https://download.pytorch.org/whl/{torch[2]}" if torch[2] else ""
    reinstall = f"pip install --force-reinstall --no-deps {wanted}{wheels}"
    if name.replace("-", "_") in {*EXTRAS, *_always()}:
        return reinstall
    return f"{reinstall}\nor, where no model needs it: pip uninstall {name}"


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _source() -> tuple[str, bool]:
    """The folder, file or URL that the running package is from, and whether it is editable."""
    checkout = Path(__file__).resolve().parents[1]
    record = _record()
    url = str(record.get("url", ""))
    if url.startswith("file:"):
        path = Path(url2pathname(urlsplit(url).path))
        url = str(path) if path.exists() else ""
    elif "vcs_info" in record:
        url = f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
    if (checkout / "release" / "build_backend.py").is_file():
        editable = url == str(checkout) and bool(record.get("dir_info", {}).get("editable"))
        return str(checkout), editable
    return url, False


def _record() -> dict[str, Any]:
    """What pip wrote of where it found this package."""
    with suppress(metadata.PackageNotFoundError, ValueError):
        found = json.loads(metadata.distribution(OURS).read_text("direct_url.json") or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _parsed(name: str, extra: str = "") -> Iterator[tuple[str, str]]:
    """(name, versions) of what a distribution requires, for one of its extras or without any."""
    with suppress(metadata.PackageNotFoundError):
        for text in metadata.requires(name) or ():
            found = _REQUIREMENT.match(text)
            asked = _EXTRA.search(text)
            if found and (asked[1] if asked else "") == extra:
                yield found[1], found[2]


def _always() -> dict[str, str]:
    """What every installation has: name of the import -> requirement."""
    return {name.replace("-", "_"): f"{name}{versions}" for name, versions in _parsed(OURS)}


def _requirements(extra: str) -> list[str]:
    """What an extra brings, with what the extras that it includes bring."""
    found: list[str] = []
    for name, versions in _parsed(OURS, extra):
        if name.startswith(f"{OURS}["):
            for one in name.partition("[")[2].rstrip("]").split(","):
                found += _requirements(one)
        else:
            found.append(f"{name}{versions}")
    return found or [library for library, one in EXTRAS.items() if one == extra]
