"""Components of pipelines without their weights: empty ones, and whether two are the same."""

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from enginecast.capture.sources.factory import config_of
from enginecast.capture.sources.huggingface.diffusers_folder import CLASS, model_class_of
from enginecast.capture.sources.huggingface.transformers_folder import CONFIG_FILE, write_config
from enginecast.capture.sources.weights.checkpoint import read_json
from enginecast.capture.sources.weights.copies import copy_module
from enginecast.capture.sources.weights.empty import buffers_to_meta, parameters_on_meta
from enginecast.errors import SourceError, first_line

BUFFERS = "buffers.safetensors"
"""What pipelines read of a component besides its config, such as the mean of latents."""
MOST_NAMED = 4
_NOT_THE_MODEL = frozenset(
    {
        *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
        *("return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id"),
    }
)
"""What a config of transformers says that does not change what the model is."""


def save_empty(component: nn.Module, folder: Path) -> None:
    """Write what `empty_component` reads: the config, and the buffers."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(config_of(component), folder)
    stored = component.state_dict()
    buffers = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in component.named_buffers()
        if name in stored
    }
    if buffers:
        save_file(buffers, folder / BUFFERS)


def empty_component(folder: Path) -> nn.Module:
    """A component of the class that its config.json names, its parameters on the meta device.

    Raises:
        SourceError: the class is none of diffusers or transformers, or does not take the config.
    """
    file, config = folder / CONFIG_FILE, read_json(folder / CONFIG_FILE)
    found = _class_of(config, folder)
    if found is None:
        named = config.get(CLASS) or config.get("architectures")
        raise SourceError(
            f"{file}: diffusers {diffusers.__version__} and transformers"
            f" {transformers.__version__} have no model class {named!r}",
            hint="A newer version may have it.",
        )
    build: Any = found
    try:
        with parameters_on_meta():
            if issubclass(found, PreTrainedModel):
                module = build(build.config_class.from_dict(config))
            else:
                module = build.from_config(config)
    except Exception as error:  # its constructor raises any kind
        raise SourceError(
            f"{file}: {found.__name__} cannot be built from it: {first_line(error)}"
        ) from error
    buffers_to_meta(module)
    if (folder / BUFFERS).is_file():
        module.load_state_dict(load_file(folder / BUFFERS), strict=False, assign=True)
    made: nn.Module = module.eval().requires_grad_(False)
    return made


def without_weights(component: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device; it shares the buffers."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False
        )
        for parameter in component.parameters()
    }
    memo |= {id(buffer): buffer for buffer in component.buffers()}
    return copy_module(component, memo)


def differences(component: nn.Module, stored: Mapping[str, Any]) -> list[str]:
    """Fields in which a component's config is not the stored one: "in_channels 4, not 8"."""
    own = getattr(component, "config", None)
    if isinstance(own, PreTrainedConfig):
        given = {n: each for n, each in stored.items() if n not in _NOT_THE_MODEL}
        pair = own.to_dict(), type(own).from_dict(given).to_dict()
    else:
        defaults = inspect.signature(type(component).__init__).parameters.values()
        known = {each.name: each.default for each in defaults if each.default is not each.empty}
        pair = dict(own or {}), {**known, **stored}
    found = list(_differing(*(json.loads(json.dumps(each, default=str)) for each in pair)))
    return found[:MOST_NAMED] + (["..."] if found[MOST_NAMED:] else [])


def _differing(own: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*own, *stored)):
        if name.startswith("_") or name in _NOT_THE_MODEL:
            continue
        if own.get(name) != stored.get(name):
            yield f"{name} {own.get(name)}, not {stored.get(name)}"


def _class_of(config: Mapping[str, Any], folder: Path) -> type[nn.Module] | None:
    if CLASS in config:
        return model_class_of(config[CLASS], folder)
    for name in config.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    return None
