"""What kind of thing a MODEL argument names, and whether it is there; needs no torch."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from enginecast.capture.sources.huggingface.hub import download_line, is_hub_name
from enginecast.errors import SourceError
from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.runtime.bundle.pipeline_folder import INDEX, pipeline_at

SCRIPTS = (".pt", ".pth", ".ts", ".torchscript", ".ckpt", ".bin")
"""Ends of the names of files that torch writes, of which those of TorchScript are models."""


MARKS = ("config.json", "modules.json", INDEX, "scheduler_config.json")
"""Files of folders that are models, or that are refused by what they are."""
Kind = Literal["folder", "program", "script", "factory"]


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
    """What to give instead of a file of code or of weights; empty for other texts."""
    if path.suffix == ".safetensors" and path.exists():
        return f"It has weights alone. Give the folder that has {MARKS[0]}, too, or a factory."
    text, _, factory = model.partition(":")
    file = Path(text)
    if file.suffix != ".py":
        return ""
    is_here = not file.is_absolute() and ".." not in file.parts
    name = ".".join(file.with_suffix("").parts) if is_here else file.stem
    where = "" if is_here else f", in the folder {file.parent}"
    return f"Name a module and its function{where}: {name}:{factory or 'FACTORY'}."


def _missing(name: str) -> str:
    """The package of a dotted name if nothing of that name can be imported; else empty."""
    top = name.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        is_there = top in sys.modules or (bool(top) and find_spec(top) is not None)
    except Exception:  # of the finders of others; the import itself says it better
        return ""
    finally:
        sys.path.pop(0)
    return "" if is_there else top or name
