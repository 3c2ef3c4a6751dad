"""Tiny random models of every type: config classes, shrunk until the model is small and builds."""

import copy
import importlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from models import perturb
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from zoo.overrides import OVERRIDES
from zoo.shrink import Plan, shrink

LARGEST = 30_000_000
"""Parameters of the largest model that is taken for tiny."""
FACTORS = (8, 16, 4, 32, 2)
WIDE_FACTORS = (32, 16, 8, 64)
"""For configs with widths of 2048 and more."""


PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}
"""Types whose base class takes a part of their config."""


PACKAGES = {
    "detectron2": ("layoutlmv2",),
    "natten": ("dinat",),
    "scipy": ("inkling_mm_model",),
    "timm": (
        "edgetam",
        "edgetam_video",
        "edgetam_vision_model",
        "fast_vlm",
        "gemma3n",
        "gemma3n_vision",
        "pe_audio_video",
        "pe_audio_video_encoder",
        "pe_video",
        "pe_video_encoder",
        "perception_lm",
        "timm_backbone",
        "timm_wrapper",
    ),
    "torchaudio": ("higgs_audio_v2_tokenizer",),
}
"""Packages that enginecast does not need, and the types whose code imports them."""


class NotBuiltError(Exception):
    """No tiny config of a type gives a model."""


def model_types() -> list[str]:
    """Every model type that transformers maps to a base class."""
    return sorted(MODEL_MAPPING_NAMES)


def package_of(model_type: str) -> str:
    """The package that a type needs beside those that enginecast needs; empty: none."""
    return next((name for name, types in PACKAGES.items() if model_type in types), "")


def missing_package(model_type: str) -> str:
    """The package that a type needs and that is not installed; empty: there is none."""
    package = package_of(model_type)
    return package if package and find_spec(package) is None else ""


def base_class(model_type: str) -> type[PreTrainedModel]:
    """The base class of a type; the first, where there are several."""
    names = MODEL_MAPPING_NAMES[model_type]
    name = names if isinstance(names, str) else names[0]
    found: type[PreTrainedModel] | None = getattr(transformers, name, None)
    if found is None:  # transformers keeps it to itself, beside the config
        place = CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_")
        found = getattr(importlib.import_module(place), name)
    return found


def candidates(model_type: str) -> Iterator[PreTrainedConfig]:
    """Tiny configs, the most likely one first.  Those that their class refuses are left out."""
    config_class = CONFIG_MAPPING[model_type]
    full = config_class().to_dict()
    refused: list[str] = []
    made = 0
    for factor in WIDE_FACTORS if _widest(full) >= 2048 else FACTORS:
        fields = shrink(full, Plan(factor))
        for path, value in OVERRIDES.get(model_type, {}).items():
            _set(fields, path, value)
        try:
            config = config_class.from_dict(fields)
        except Exception as error:  # config classes raise what they like
            refused.append(f"config: {type(error).__name__}: {error}")
            continue
        made += 1
        yield config
    if not made:
        raise NotBuiltError(refused[0])


def build(model_type: str) -> Iterator[PreTrainedModel]:
    """Tiny models with seeded, perturbed weights, in eval mode.

    Raises:
        NotBuiltError: after the last, when there was none.
    """
    model_class = base_class(model_type)
    reasons: list[str] = []
    found = False
    for whole in candidates(model_type):
        config = getattr(whole, PARTS.get(model_type, ""), whole)
        try:
            size = parameters_of(model_class, config)
            if size > LARGEST:
                reasons.append(f"{size / 1e6:.0f} M parameters")
                continue
            torch.manual_seed(0)
            model = model_class(config).eval()
            perturb(model)
        except Exception as error:  # a model's constructor raises what it likes
            reasons.append(f"{type(error).__name__}: {str(error).strip()[:300]}")
            continue
        found = True
        yield model
    if not found:
        raise NotBuiltError(reasons[0] if reasons else "no config")


def parameters_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> int:
    """How many parameters a model would have; 0 where its constructor needs real tensors."""
    try:
        with torch.device("meta"):
            model = model_class(copy.deepcopy(config))
    except (RuntimeError, NotImplementedError):
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model the way users have it."""
    model.save_pretrained(folder)
    return folder


def _widest(fields: Mapping[str, Any]) -> int:
    """The largest hidden size, sub-configs included."""
    own = [v for k, v in fields.items() if k in ("hidden_size", "d_model") and isinstance(v, int)]
    return max([0, *own, *(_widest(v) for v in fields.values() if isinstance(v, Mapping))])


def _set(fields: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
    fields[name] = value
