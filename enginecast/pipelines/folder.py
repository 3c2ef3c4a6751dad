"""The folder of a diffusion pipeline, as diffusers writes it: what is in it, and loading it."""

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch

from enginecast.capture.python.quiet import quiet_transformers
from enginecast.capture.sources.huggingface.diffusers_folder import (
    CLASS,
    STEM,
    model_class_of,
    warn_of_newer,
)
from enginecast.capture.sources.huggingface.transformers_folder import CONFIG_FILE
from enginecast.capture.sources.weights.checkpoint import WeightNames, find_weight_files, read_json
from enginecast.errors import SourceError, first_line
from enginecast.installation import required
from enginecast.pipelines.record import INDEX, require_pipeline


@dataclass(frozen=True)
class PipelineFolder:
    """A folder with a model_index.json that diffusers can load without code of its own."""

    path: Path
    kind: Any
    """The class of the pipeline."""
    index: Mapping[str, Any]
    variant: str = ""

    @cached_property
    def parts(self) -> dict[str, tuple[str, str]]:
        """Library and class of each component that the folder has."""
        found = {name: value for name, value in self.index.items() if _is_part(value)}
        return {n: (str(v[0]), str(v[1])) for n, v in found.items() if (self.path / n).is_dir()}

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Components that the pipeline does without, and the folder does not have."""
        optional = self.kind._optional_components
        return tuple(name for name in optional if name not in self.parts)

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Components that have weights.

        Raises:
            SourceError: weights that are not read, such as pickles.
        """
        return tuple(
            name for name in self.parts if find_weight_files(self.path / name, self._files(name))
        )

    def is_of_diffusers(self, name: str) -> bool:
        """Whether a component is a model of diffusers: transformers' are written otherwise."""
        file = self.path / name / CONFIG_FILE
        named = read_json(file).get(CLASS) if file.is_file() else None
        return model_class_of(named, file.parent) is not None

    def foreign(self, name: str) -> str:
        """The library whose models are not exported; empty: it is diffusers or transformers."""
        library = self.parts[name][0]
        known = library == "transformers" or self.is_of_diffusers(name)
        return "" if known else library

    def variant_of(self, name: str) -> str:
        """That of the weights of a component: as in diffusers, none where it has no such files."""
        return self._files(name).variant

    def copy(self, name: str, target: Path) -> None:
        """Copy a component; the weights of the variant get the plain names."""
        shutil.copytree(self.path / name, target, dirs_exist_ok=True)
        for folder, _, _ in os.walk(target):
            Path(folder).chmod(0o755)  # the pipeline's may be read-only
        names, plain = self._files(name), self._plain(name)
        if names == plain:
            return
        for file, plain_file in ((names.single, plain.single), (names.index, plain.index)):
            (target / plain_file).unlink(missing_ok=True)
            if (target / file).is_file():
                (target / file).rename(target / plain_file)

    def _files(self, name: str) -> WeightNames:
        plain = self._plain(name)
        names = WeightNames.of(plain.single.removesuffix(".safetensors"), self.variant)
        there = [(self.path / name / file).is_file() for file in (names.single, names.index)]
        return names if any(there) else plain

    def _plain(self, name: str) -> WeightNames:
        return WeightNames.of(STEM if self.is_of_diffusers(name) else "model")

    def load(
        self, given: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float32
    ) -> Any:
        """The pipeline, from files alone.

        Args:
            given: components that are there already.

        Raises:
            SourceError: diffusers cannot load it.
        """
        options: dict[str, Any] = {name: None for name in self.absent} | dict(given or {})
        if self.variant:
            options["variant"] = self.variant
        with quiet_diffusers():
            try:
                pipe = self.kind.from_pretrained(
                    self.path,
                    dtype=dtype,
                    local_files_only=True,
                    use_safetensors=True,
                    **options,
                )
            except Exception as error:  # its components raise any kind
                raise SourceError(
                    f"{self.path}: diffusers cannot load it: {first_line(error)}"
                ) from error
        pipe.set_progress_bar_config(disable=True)
        return pipe


def open_pipeline(path: Path, variant: str = "") -> PipelineFolder:
    """Look at the folder of a pipeline.

    Raises:
        SourceError: it is none, or wants code of its own, or a class that diffusers does not have.
        MissingError: diffusers is not installed.

    Warns:
        EnginecastWarning: a newer diffusers wrote it.
    """
    require_pipeline(path)
    with required("diffusers", f"{path}: a pipeline", "diffusers"):
        import diffusers
    file = path / INDEX
    index = read_json(file)
    name = index.get(CLASS)
    if isinstance(name, (list, tuple)) or any(path.glob("*.py")):
        raise SourceError(
            f"{file}: the pipeline needs code from its own repository, which is not run",
            hint="Load it in Python; `enginecast.record` and `enginecast.export` take its models.",
        )
    with quiet_diffusers():
        kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, diffusers.DiffusionPipeline):
        raise SourceError(
            f"{file}: {CLASS}: diffusers {diffusers.__version__} has no pipeline {name!r}",
            hint="A newer diffusers may have it.",
        )
    folder = PipelineFolder(path, kind, index, variant)
    _require_parts(folder)
    warn_of_newer(index)
    return folder


def _require_parts(folder: PipelineFolder) -> None:
    """Refuse a folder that lacks a component, code of a component's own, and a missing variant."""
    expected, _ = folder.kind._get_signature_keys(folder.kind)
    for name in expected:
        needed = name not in folder.kind._optional_components and _is_part(folder.index.get(name))
        if needed and name not in folder.parts:
            raise SourceError(f"{folder.path}: the component {name} of {INDEX} is missing")
    for name in folder.parts:
        if any((folder.path / name).glob("*.py")):
            raise SourceError(
                f"{folder.path / name}: the component needs code from its own repository, which is"
                " not run"
            )
    if folder.variant and not any(folder.variant_of(name) for name in folder.models):
        raise SourceError(
            f"{folder.path}: no component has weights of the variant {folder.variant!r}",
            hint="Leave --variant out for the plain ones.",
        )


def _is_part(value: object) -> bool:
    """Whether an entry of the index names a component: ["library", "Class"]."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return False
    return all(isinstance(each, str) for each in value)


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Without bars, and what diffusers says of how it likes its configs."""
    from diffusers.utils import logging

    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)  # errors are raised, too
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), quiet_transformers():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()
