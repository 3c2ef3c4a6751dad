"""What a MODEL argument may be: a folder, a config alone, a factory, a `.pt2` program, or a
TorchScript file.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.calls.recording import Recorded, require_one
from enginecast.capture.sources.huggingface.component_options import DEFAULTS, ComponentOptions
from enginecast.capture.sources.place import WEIGHTS, kind_of
from enginecast.errors import UsageError


def open_source(
    model: str | nn.Module,
    *,
    random_weights: int | None = None,
    allow_code: bool = False,
    example: Any = None,
    component: ComponentOptions = DEFAULTS,
) -> Source:
    """Open a MODEL argument: the one place that looks at what it is.

    Args:
        model: a Hugging Face folder, that of a component of diffusers, the file of weights beside
            its config, `package.module:factory`, a `.pt2` file, a file of TorchScript, or a module,
            of which a copy is taken.
        random_weights: seed for random weights; only for a folder that has a config and no weights.
        allow_code: whether a file may be loaded whose loading can run code.
        example: inputs, for a module or a file of TorchScript, as `arguments_of` takes them; or
            recorded calls, for a folder, too.
        component: for a folder.

    Raises:
        SourceError: the model cannot be read.
        UsageError: an option does not fit the kind of model.
    """
    require_one(example)
    is_file = isinstance(model, str) and Path(model).suffix in WEIGHTS
    is_folder = is_file or (isinstance(model, str) and Path(model).is_dir())
    given = [*component.given, *(["single-file"] if component.single_file else [])]
    if given and (not is_folder or (is_file and component.single_file)):
        name = given[-1]
        shown = model if isinstance(model, str) else type(model).__name__
        raise UsageError(f"--{name} does not fit {shown}: it is for a model's folder")
    if isinstance(model, nn.Module):
        from enginecast.capture.sources.factory import take_module

        return take_module(model, example)
    if random_weights is not None and not is_folder:
        raise UsageError(
            f"--random-weights {random_weights} does not fit {model!r}: it is for a folder with a "
            "config.json and no weights"
        )
    path, kind = Path(model), kind_of(model)
    if kind == "weights":
        path, component = path.parent, replace(component, single_file=path)
    if kind in ("folder", "weights"):
        found = _open_folder(path, random_weights, component)
        if isinstance(example, Recorded):
            from enginecast.capture.sources.calls.recorded import RecordedSource

            return RecordedSource(found, example)
        return found
    if kind == "program":
        from enginecast.capture.sources.program_file import open_program_file

        return open_program_file(path, allow_code=allow_code)
    if kind == "script":
        from enginecast.capture.sources.script_file import open_script_file

        return open_script_file(path, allow_code=allow_code, example=example)
    from enginecast.capture.sources.factory import open_factory

    return open_factory(model)


def _open_folder(folder: Path, random_weights: int | None, component: ComponentOptions) -> Source:
    if _is_of_diffusers(folder):
        from enginecast.capture.sources.huggingface.diffusers_folder import open_component

        return open_component(folder, random_weights, component)
    from enginecast.capture.sources.huggingface.sentence_folder import (
        is_sentence_folder,
        open_sentence_folder,
    )

    if component.single_file is None and is_sentence_folder(folder):
        return open_sentence_folder(folder, random_weights, component)
    from enginecast.capture.sources.huggingface.transformers_folder import open_folder

    return open_folder(folder, random_weights, component)


def _is_of_diffusers(folder: Path) -> bool:
    """Whether diffusers wrote a folder; one whose config is broken is left to who reads it."""
    if (folder / "scheduler_config.json").is_file():
        return True
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "_class_name" in config
