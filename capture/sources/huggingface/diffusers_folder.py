"""Folders of diffusers' components: config.json with `_class_name`, and safetensors weights or a
seed for random ones.
"""

import copy
import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.inputs.calls import call_of_names, take_named_tensors
from enginecast.capture.inputs.derive.diffusion import FAMILIES, Component, Described
from enginecast.capture.inputs.specs import InputSpec, with_example_sizes
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.sources.base.source import Source, elements_of
from enginecast.capture.sources.huggingface.component_options import ComponentOptions
from enginecast.capture.sources.huggingface.hub import model_name
from enginecast.capture.sources.huggingface.quantized_folder import KEY, is_in_fp8, stored_in
from enginecast.capture.sources.huggingface.single_file import as_diffusers
from enginecast.capture.sources.huggingface.transformers_folder import (
    CONFIG_FILE,
    require_weights,
    write_config,
)
from enginecast.capture.sources.weights.checkpoint import (
    LOADABLE,
    WeightNames,
    read_json,
    sha256_of_weights,
    some,
    weights_file,
)
from enginecast.capture.sources.weights.empty import buffers_to_meta, parameters_on_meta
from enginecast.capture.sources.weights.finite import require_finite
from enginecast.capture.sources.weights.published import Scales, Stored
from enginecast.capture.sources.weights.widened import fill_widened
from enginecast.errors import EnginecastWarning, SourceError, UsageError, first_line
from enginecast.installation import required
from enginecast.runtime.bundle.pipeline_folder import INDEX

STEM = "diffusion_pytorch_model"
CLASS = "_class_name"
VERSION = "_diffusers_version"
WHERE_FROM = ("_name_or_path", VERSION)
"""Entries that say where a config comes from, and not what it is."""
ENTRIES = ("decode", "encode")
"""Methods of an autoencoder that are engines of their own; the first is what pipelines end with."""


class ComponentSource(Source):
    """A transformer, UNet, autoencoder or other model of a diffusion pipeline."""

    def __init__(
        self,
        folder: Path,
        model_class: type[nn.Module],
        settings: Mapping[str, Any],
        seed: int | None,
        options: ComponentOptions,
    ) -> None:
        self.folder: Path = folder
        self.model_class = model_class
        self.settings = settings
        """The config, with the defaults of the class."""
        self.seed = seed
        self.options = options
        self.names = WeightNames.asked(STEM, options.variant, options.single_file)
        self.name = Path(self.names.single).stem if self.names.is_alone else model_name(folder)
        self.entry = _entry(model_class, options.entry, folder)

    def as_called(self) -> "ComponentSource":
        described = self._described
        if described is None:
            return self
        found, paths = copy.copy(self), [spec.name for spec in described.inputs]
        found.call = call_of_names(paths, described.constants, self.entry or "forward")
        return found

    def inputs(self) -> tuple[InputSpec, ...]:
        if self._described is None:
            raise UsageError(
                f"the inputs of {self.settings[CLASS]} are not known",
                hint="Record them from a pipeline (enginecast.record), or give them:"
                " --inputs FILE.safetensors.",
            )
        specs = (replace(s, name=s.name.replace(".", "_")) for s in self._described.inputs)
        return with_example_sizes(tuple(specs))

    @cached_property
    def _described(self) -> Described | None:
        """The arguments of its class; None where they are not known."""
        family = FAMILIES.get(self.settings[CLASS])
        size = self.options
        known = Component(
            self.name, self.settings, self.entry, size.height, size.width, size.frames
        )
        return None if family is None else family(known)

    def write_beside(self, folder: Path) -> None:
        super().write_beside(folder)
        write_config(read_json(self.folder / CONFIG_FILE), folder)

    @cached_property
    def _fingerprint(self) -> Mapping[str, str]:
        stored = read_json(self.folder / CONFIG_FILE)
        kept = {name: value for name, value in stored.items() if name not in WHERE_FROM}
        config = json.dumps(kept, sort_keys=True).encode()
        digest, lost = ("", {}) if self.in_memory else sha256_of_weights(self.folder, self.names)
        buffers = {name for name, _ in self._bare().named_buffers()} if lost else set()
        for name, each in lost.items():
            what = f"{weights_file(self.folder, name, self.names)}: {name}"
            require_finite(each, what, is_buffer=name in buffers)
        weights = {"random_weights": str(self.seed)} if self.in_memory else {"weights": digest}
        asked = {**self.options.given, **({"entry": self.entry} if self.entry else {})}
        return {"config": hashlib.sha256(config).hexdigest(), **weights, **asked}

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        if dtype == torch.float32:
            return take_named_tensors(fill_widened(self._bare(), self.weights()), self.call)
        module = self._bare(dtype)
        kept = set(getattr(self.model_class, "_keep_in_fp32_modules", None) or ())
        module.load_state_dict(
            {n: _cast(t, n, kept, dtype) for n, t in self.weights().items()}, assign=True
        )
        return take_named_tensors(module.requires_grad_(False), self.call)

    def empty(self) -> nn.Module:
        return take_named_tensors(self._bare(), self.call)

    def weights(self) -> dict[str, Tensor]:
        if self.seed is not None:
            return dict(self._construct(self.seed).state_dict())
        return dict(self._named)

    @property
    def in_memory(self) -> bool:
        return self.seed is not None

    @property
    def maps_mixed(self) -> bool:
        return True

    @property
    def forward_signature(self) -> inspect.Signature:
        if self.call is not None:
            return self.call.signature
        assert self.model_class is not None
        signature = inspect.signature(getattr(self.model_class, self.entry or "forward"))
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def weight_elements(self) -> dict[torch.dtype, int]:
        tensors = self._bare().state_dict() if self.in_memory else self._named
        return elements_of(tensors.values())

    @cached_property
    def _named(self) -> Mapping[str, Tensor]:
        """What the files hold, mapped once, by the names that the class has today."""
        kept = self._by_name(dict(self.stored.tensors))
        return {n: t.float() if t.dtype == torch.float64 else t for n, t in kept.items()}

    def scales(self) -> Scales:
        return self.stored.scales_by(self._by_name)

    def _by_name(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        empty: Any = self._bare()
        expected = empty.state_dict()
        if self.names.is_alone and not expected.keys() <= tensors.keys():
            owner = type(empty)
            tensors = as_diffusers(tensors, expected, owner, self.settings, self._file)
        empty._fix_state_dict_keys_on_load(tensors)
        self._check(tensors, expected)
        return {name: tensors[name] for name in expected}

    @cached_property
    def stored(self) -> Stored:
        if self.in_memory:
            return Stored({})
        assert self.model_class is not None
        return stored_in(self.folder, self.names, self.settings, self.model_class)

    @property
    def _file(self) -> Path:
        return weights_file(self.folder, names=self.names)

    def _check(self, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Refuse weights that are not those of the class."""
        file, owner = self._file, self.settings[CLASS]
        ignored = getattr(self.model_class, "_keys_to_ignore_on_load_unexpected", None) or ()
        extra = {
            name
            for name in tensors.keys() - expected.keys()
            if not any(re.search(pattern, name) for pattern in ignored)
        }
        for names, what in (
            (expected.keys() - tensors.keys(), "misses"),
            (extra, "has no place for"),
        ):
            if names:
                raise SourceError(
                    f"{file}: {owner} {what} {some(names)}",
                    hint="config.json does not belong to these weights.",
                )
        for name, tensor in expected.items():
            found = tensors[name]
            if found.shape != tensor.shape:
                raise SourceError(
                    f"{file}: {name} has shape {list(found.shape)}, {owner} expects"
                    f" {list(tensor.shape)}",
                    hint="config.json does not belong to these weights.",
                )
            if found.is_floating_point() and found.dtype not in LOADABLE:
                raise SourceError(
                    f"{file}: {name} is stored as {found.dtype}, expected float32, float16,"
                    " bfloat16, float64, float8_e4m3fn or float8_e5m2"
                )

    def _bare(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model, its parameters and persistent buffers on the meta device."""
        with parameters_on_meta(), _default(dtype):
            module = self._construct()
        return buffers_to_meta(module)

    def _construct(self, seed: int = 0) -> nn.Module:
        build: Any = self.model_class
        try:
            with torch.random.fork_rng(devices=[]), quiet_torch():
                torch.manual_seed(seed)
                module: nn.Module = build.from_config({**self.settings, KEY: None})
        except Exception as error:  # its constructor raises any kind
            raise SourceError(
                f"{self.folder / CONFIG_FILE}: {self.settings[CLASS]} cannot be built from it:"
                f" {first_line(error)}"
            ) from error
        return module.eval().requires_grad_(False)


def open_component(
    folder: Path, random_weights: int | None, options: ComponentOptions
) -> ComponentSource:
    """Open the folder of a component.

    Raises:
        SourceError: its config or its weights cannot be used.
        UsageError: an option does not fit it.
        MissingError: diffusers is not installed.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise SourceError(
            f"{folder} is a scheduler, which has no weights", hint="Schedulers stay in Python."
        )
    file, settings = folder / CONFIG_FILE, read_json(folder / CONFIG_FILE)
    model_class = _find_class(settings[CLASS], file)
    if "auto_map" in settings:
        raise SourceError(
            f"{file}: auto_map: the model needs code from its own repository, which is not run",
            hint="Write a factory that builds the model, and give package.module:factory.",
        )
    if settings.get(KEY) is not None:
        is_in_fp8(settings, file)  # or a library is there
    names = WeightNames.asked(STEM, options.variant, options.single_file)
    require_weights(folder, names, random_weights)
    warn_of_newer(settings)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(model_class.__init__).parameters.items()
        if parameter.default is not parameter.empty
    }
    return ComponentSource(folder, model_class, {**defaults, **settings}, random_weights, options)


def warn_of_newer(config: Mapping[str, Any]) -> None:
    """Warn once of a config that a newer diffusers wrote."""
    import diffusers

    written, here = str(config.get(VERSION, "")), diffusers.__version__
    if _release(written) > _release(here):
        _warn_of_newer(written, here)


@cache  # a pipeline and all of its components were written by one; Python's own filter is reset
def _warn_of_newer(written: str, here: str) -> None:
    warnings.warn(
        f"the model was written by diffusers {written}; here is {here}, whose classes may compute"
        " something else or lack a setting",
        EnginecastWarning,
        stacklevel=1,
    )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of "0.43.0.dev0": (0, 43, 0); of other text none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return () if found is None else tuple(map(int, found[0].split(".")))


def model_class_of(name: object, folder: Path) -> type[nn.Module] | None:
    """A class of diffusers by its name: a public one, or one of some pipelines alone, as LTX-2's
    connectors, where the index of the pipeline around the folder says whose it is.
    """
    import diffusers

    index, owner = folder.parent / INDEX, None
    if isinstance(name, str) and not hasattr(diffusers, name) and index.is_file():
        listed = read_json(index).get(folder.name)
        if isinstance(listed, list) and len(listed) == 2 and isinstance(listed[0], str):
            owner = getattr(diffusers.pipelines, listed[0], None)
    found = getattr(owner or diffusers, name, None) if isinstance(name, str) else None
    is_model = isinstance(found, type) and issubclass(found, diffusers.ModelMixin)
    return found if is_model else None


def _find_class(name: object, file: Path) -> type[nn.Module]:
    with required("diffusers", f"{file}: {name}", "diffusers"):
        import diffusers
    found = model_class_of(name, file.parent)
    if found is None:
        raise SourceError(
            f"{file}: {CLASS}: diffusers {diffusers.__version__} has no model class {name!r}",
            hint="A newer diffusers may have it; for a class of your own, write a factory.",
        )
    return found


def _entry(model_class: type[nn.Module], asked: str, folder: Path) -> str:
    """The method that is exported; empty: `forward`."""
    has = tuple(name for name in ENTRIES if callable(getattr(model_class, name, None)))
    if asked and asked not in has:
        raise UsageError(
            f"--entry {asked} does not fit {folder}: {model_class.__name__} has"
            f" {' and '.join(has) or 'forward alone'}"
        )
    return asked or (has[0] if len(has) == len(ENTRIES) else "")


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _cast(tensor: Tensor, name: str, kept: set[str], dtype: torch.dtype) -> Tensor:
    """As `from_pretrained` casts it."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float32 if kept.intersection(name.split(".")) else dtype)
