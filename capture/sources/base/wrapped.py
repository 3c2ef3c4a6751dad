"""The base class of sources that wrap another source's model and call it differently."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.weights.published import Scales, Stored


class WrappedSource(Source):
    """A source that has the weights, names and files of another one.

    Args:
        model: the other source.
    """

    def __init__(self, model: Source) -> None:
        self._model = model
        self.name = model.name
        self.config = model.config
        self.model_class = model.model_class
        self.trained = model.trained
        self.notes = model.notes
        self.tokenizer_files = model.tokenizer_files
        self.longest_text = model.longest_text
        self.text_form, self.pads = model.text_form, model.pads

    @property
    def constants(self) -> Mapping[str, Any]:
        return self._model.constants

    def write_beside(self, folder: Path) -> None:
        self._model.write_beside(folder)

    def weights(self) -> dict[str, Tensor]:
        return self._model.weights()

    @property
    def stored(self) -> Stored:
        return self._model.stored

    def scales(self) -> Scales:
        return self._model.scales()

    def weight_elements(self) -> dict[torch.dtype, int]:
        return self._model.weight_elements()

    @property
    def forward_signature(self) -> inspect.Signature:
        return self._model.forward_signature

    @property
    def tokenized(self) -> tuple[str, ...]:
        return self._model.tokenized

    @property
    def in_memory(self) -> bool:
        return self._model.in_memory

    @property
    def keeps_dtypes(self) -> bool:
        return self._model.keeps_dtypes

    @property
    def maps_mixed(self) -> bool:
        return self._model.maps_mixed
