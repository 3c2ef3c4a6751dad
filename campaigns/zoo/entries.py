"""Models that are not called as `model(**inputs)` on a folder: a factory calls them as users do.

Some base classes have no `forward`, or one that takes a Python object; what such a model offers
for tensors is a method.  Others are read from no folder.  `zoo.entries:make` is the factory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

MADE: list[tuple[nn.Module, dict[str, Tensor]]] = []
"""The module that the factory returns in this process, and its inputs."""


class Encode(nn.Module):
    """What a quantizer does with the features of images."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, hidden_states: Tensor) -> Any:
        return self.model.encode(hidden_states)


class ImageFeatures(nn.Module):
    """The features of a frame, which trackers of objects in videos keep in their session."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, pixel_values: Tensor) -> Any:
        return self.model.get_image_features(pixel_values)


class Conditioned(nn.Module):
    """A text model that takes the delay of the text behind the sound."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, t_cond: Tensor) -> Any:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "t_cond": t_cond}
        return self.model(**given, use_cache=False)


def semantic(model: PreTrainedModel) -> nn.Module:
    """The first of Bark's three models, without a cache."""
    model.semantic.config.use_cache = False
    found: nn.Module = model.semantic
    return found


@dataclass(frozen=True)
class Entry:
    """How a model is called."""

    wrap: Callable[[PreTrainedModel], nn.Module] = lambda model: model
    called: str = ""
    """What is called, for the table; empty: the model itself."""


ENTRIES = {
    "bark": Entry(semantic, "semantic"),
    "edgetam_video": Entry(ImageFeatures, "get_image_features"),
    "glm_image_vqmodel": Entry(Encode, "encode"),
    "pe_audio_video": Entry(),
    "sam2_video": Entry(ImageFeatures, "get_image_features"),
    "sam3_tracker_video": Entry(ImageFeatures, "get_image_features"),
    "timm_backbone": Entry(),
    "voxtral_realtime_text": Entry(Conditioned),
}
"""By model type.  TimmBackbone.from_pretrained takes names of timm alone, and that of
PeAudioVideoModel takes a buffer of timm's for a weight that is tied, and fails."""


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The factory."""
    return MADE[-1]
