"""What kind of thing a MODEL argument names, and whether it is there; needs no torch."""

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from enginecast.capture.sources.huggingface.hub import download_line, is_hub_name
from enginecast.errors import SourceError
from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.runtime.bundle.pipeline_folder import INDEX, pipeline_at

SCRIPTS = (".pt", ".pth", ".ts", ".torchscript", ".ckpt", ".bin")
"""Ends of the names of files that torch writes, of which those of TorchScript are models."""


WEIGHTS = (".safetensors", ".gguf")
"""Ends of the names of files that hold the weights of a folder."""
MARKS = ("config.json", "modules.json", INDEX, "scheduler_config.json")
"""Files of folders that are models, or that are refused by what they are."""
WAYS = ("sys.modules", "__path__", "meta_path", "declare_namespace")
"""Words in a package's code that may add modules which are in no folder of it."""
Kind = Literal["folder", "weights", "program", "script", "factory"]


def kind_of(model: str) -> Kind:
    """What a MODEL is, by its name and what is on the disk; nothing of it is read.

    Raises:
        SourceError: there is no such folder, file or importable module, or it cannot be read.
    """
    try:
        return _kind_at(Path(model), model)
    except OSError as error:  # a folder of others, a name that is too long
        raise SourceError(f"{model}: cannot be read: {error.strerror}") from error


def _kind_at(path: Path, model: str) -> Kind:
    if path.is_dir():
        if not any(path.iterdir()):
            raise SourceError(
                f"{path}: expected a model, but the folder is empty",
                hint="Give a Hugging Face folder: config.json, safetensors, a tokenizer.",
            )
        if (path / MANIFEST_NAME).is_file():
            raise SourceError(
                f"{path}: expected a model, but it is a bundle: an engine that was exported",
                hint="`enginecast run`, `verify`, `inspect` and `bench` take bundles.",
            )
        kind = pipeline_at(path)
        if kind == "source":
            parts = ", ".join(str(file.parent) for file in sorted(path.glob("*/config.json")))
            raise SourceError(
                f"{path} is a whole pipeline, not a model",
                hint=f"`enginecast diffusers export {path} -o DIR` exports all of it; or give one"
                f" of its components: {parts}.",
            )
        if kind == "engines":
            raise SourceError(
                f"{path}: expected a model, but it is a pipeline of engines",
                hint="`enginecast diffusers run`, `verify`, `inspect`, `bench` and `report` take"
                " them.",
            )
        if not any((path / name).is_file() for name in MARKS):
            raise SourceError(
                f"{path / MARKS[0]} is missing",
                hint="A model's folder has it beside the weights. Of a module of your own, give"
                " package.module:factory.",
            )
        return "folder"
    is_script = path.suffix in SCRIPTS and (path.is_file() or ":" not in model)
    if is_script or path.suffix == ".pt2":
        if not path.exists():
            raise SourceError(f"{path} does not exist")
        return "script" if is_script else "program"
    if path.suffix in WEIGHTS and ":" not in model:
        if not path.is_file():
            raise SourceError(f"{path} does not exist")
        if not (path.parent / MARKS[0]).is_file():
            raise SourceError(
                f"{path} has weights alone: there is no {MARKS[0]} beside it",
                hint=f"Give the folder that has {MARKS[0]}: FOLDER --single-file {path}.",
            )
        return "weights"
    if "://" in model and not path.exists():
        raise SourceError(
            f"{model} is a URL, expected a model on this machine",
            hint="From the Hugging Face hub: --download, with OWNER/NAME.",
        )
    if ":" in model and not path.exists():
        name = model.partition(":")[0]
        if missing := _missing(name):
            raise SourceError(
                f"{model}: importing {name!r} failed: ModuleNotFoundError: No module named"
                f" {missing!r}",
                hint=_meant(path, model),
            )
        return "factory"
    if is_hub_name(model):
        raise SourceError(
            f"{model!r} is not a model here: no such folder",
            hint=f"From the Hugging Face hub: --download, or {download_line(model)}",
        )
    raise SourceError(
        f"{model!r} is not a model: "
        + ("a file of unknown kind" if path.exists() else "no such file or folder"),
        hint=_meant(path, model)
        or "Give a Hugging Face folder, package.module:factory, a .pt2 program, or a TorchScript"
        " file.",
    )


def _meant(path: Path, model: str) -> str:
    """What to give instead of a file of code; empty for other texts."""
    text, _, factory = model.partition(":")
    file = Path(text)
    if file.suffix != ".py":
        return ""
    is_here = not file.is_absolute() and ".." not in file.parts
    name = ".".join(file.with_suffix("").parts) if is_here else file.stem
    where = "" if is_here else f", in the folder {file.parent}"
    return f"Name a module and its function{where}: {name}:{factory or 'FACTORY'}."


def _missing(name: str) -> str:
    """The first part of a dotted name that does not exist, found without importing; else empty."""
    if name in sys.modules:
        return ""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        top, *rest = name.split(".")
        found = find_spec(top) if top else None
        if found is None:
            return top or name
        for part in rest:
            if top in sys.modules or _is_dynamic(found):  # what is imported may have changed
                return ""
            top, folders = f"{top}.{part}", list(found.submodule_search_locations or ())
            found = _found_in(top, folders)
            if found is None:
                return top
    except Exception:  # of the finders of others; the import itself says it better
        return ""
    finally:
        sys.path.remove(folder)
    return ""


def _found_in(name: str, folders: list[str]) -> ModuleSpec | None:
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    specs = (find(name, folders, None) for find in finders if find is not None)
    return next((spec for spec in specs if spec is not None), None)


def _is_dynamic(module: ModuleSpec) -> bool:
    """Whether a module's own code may add modules below it, such as `six.moves`."""
    if module.origin is None:  # a namespace: no code
        return False
    code = Path(module.origin).read_text(encoding="utf-8", errors="replace")
    return any(word in code for word in WAYS)
