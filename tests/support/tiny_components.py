"""Tiny components of diffusion pipelines, a config for each class whose inputs are known."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)
"""A class and its config by name."""


def save(name: str, folder: Path, seed: int = 0, **more: Any) -> Path:
    """Write a component as `save_pretrained` does, with seeded weights."""
    torch.manual_seed(seed)
    kind, config = CONFIGS[name]
    getattr(diffusers, kind)(**config).save_pretrained(folder, **more)
    return folder
