"""What a family of models is to the tests, and the sizes that their tiny configs share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from models import VOCABULARY, save
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

Sizes = tuple[int | str, ...]
BATCH = "batch 1..64"


def tokens(longest: int) -> dict[str, Sizes]:
    """What is derived of token ids and their mask."""
    return dict.fromkeys(("input_ids", "attention_mask"), (BATCH, f"sequence 1..{longest}"))


def image(height: int, width: int, channels: int = 3) -> dict[str, Sizes]:
    """What is derived of images."""
    return {"pixel_values": (BATCH, channels, height, width)}


@dataclass(frozen=True)
class Family:
    """One family: how its model is made, and what must come out of its export."""

    name: str
    model_class: type[nn.Module]
    make: Callable[[Path], Path]
    """Writes the model; a folder, or for `factory` a Python file."""
    inputs: Mapping[str, Sizes]
    """Inputs that must be derived, with their ranges."""
    other: Mapping[str, int]
    """Sizes of the dimensions in a run that neither the trace nor the verification saw."""
    fused: Mapping[str, int]
    """Fusions that must be in the engine."""
    is_slow: bool = False
    """Another family in the default run has its mechanisms."""
    factory: str | None = None
    """MODEL argument, where it is not the folder."""
    weight: str = ""
    """One element of it is changed to see that verification notices."""
    growth: float = 1.0
    """By how much, in units of the tensor's root mean square."""
    half: str = "verified-by-emulation"
    """Outcome of an fp16 export."""


def saved(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 1
) -> Callable[[Path], Path]:
    """A maker of a seeded, perturbed model in fp32."""
    return lambda folder: save(model_class, config, folder, torch.float32, seed)


TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "intermediate_size": 48}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_channels": 3, **HEADS}
WIDE = {"batch": 3, "sequence": 61}
FEW = {"batch": 5}
