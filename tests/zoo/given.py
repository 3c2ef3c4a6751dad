"""Inputs as the processor of a model type makes them, where its config does not say it all.

What is here goes through `--inputs FILE.safetensors`, as a user gives it.  This is data of the
test; the product has no such table.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

Inputs = dict[str, Tensor]
Config = Any
"""A config, whose fields depend on the model type."""


def _floats(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1))


def _ids(high: int, *sizes: int) -> Tensor:
    return torch.randint(3, high, sizes, generator=torch.Generator().manual_seed(2))


GIVEN: dict[str, Callable[[Config], Inputs]] = {}


def given_inputs(model_type: str, config: PreTrainedConfig) -> Inputs:
    """The inputs of a type, for a tiny config of it."""
    return GIVEN[model_type](config)
