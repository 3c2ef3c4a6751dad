"""Facts about a model before it is built: its config, its forward, and its documentation."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn
from transformers import PreTrainedConfig

from enginecast.capture.inputs.calls import Fixed
from enginecast.capture.inputs.text_config import number_of, parts_of

DOCUMENTED = re.compile(
    r"^\s*(?P<name>\w+) \(`(?:torch\.)?(?P<type>\w+)`(?: of shape `(?P<shape>\([^`]*\))`)?", re.M
)
"""An argument as transformers documents it: "pixel_values (`torch.Tensor` of shape `(..)`"."""

GRIDS = ("grid_thw", "image_grid_thw")
"""[images, 3]: frames, rows and columns of patches, by image."""


@dataclass(frozen=True)
class ModelFacts:
    """A transformers model as its config and its class describe it."""

    config: PreTrainedConfig
    arguments: tuple[str, ...]
    """Arguments of `forward`, in order."""
    name: str = "the model"
    required: tuple[str, ...] = ()
    """Arguments without a default."""
    main: tuple[str, ...] = ()
    """`main_input_name` of the class, where `forward` has such an argument."""
    shapes: dict[str, str] = field(default_factory=dict)
    """Documented types and shapes by argument: "LongTensor of shape (batch_size, 4)"."""
    tokenized: tuple[str, ...] = ()
    """Outputs of the model's tokenizer."""
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    """Constant tensors that are part of the engine, by argument."""

    @cached_property
    def parts(self) -> tuple[PreTrainedConfig, ...]:
        """The config and the configs inside it, outermost first."""
        return tuple(parts_of(self.config))

    def number(self, *names: str) -> int | None:
        """The first integer that a config has under one of `names`; outer configs first."""
        found = (number_of(part, *names) for part in self.parts)
        return next((value for value in found if value is not None), None)


def documented(model_class: type[nn.Module] | None) -> dict[str, str]:
    """The type and shape that the docstring of `forward` gives for each tensor."""
    doc = inspect.getdoc(getattr(model_class, "forward", None)) or ""
    found: dict[str, str] = {}
    for match in DOCUMENTED.finditer(doc):
        shape = f" of shape {match['shape']}" if match["shape"] else ""
        if "Tensor" in match["type"]:
            found.setdefault(match["name"], f"{match['type']}{shape}")
    return found


def numbers_of(config: object, name: str) -> tuple[int, ...] | None:
    """The positive whole numbers of a list in `config`, or None."""
    value = getattr(config, name, None)
    if not isinstance(value, (list, tuple)) or not value:
        return None
    return tuple(value) if all(isinstance(item, int) and item > 0 for item in value) else None
