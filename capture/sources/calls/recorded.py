"""A model that is not called through its plain `forward`: as recorded, or with constants."""

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from enginecast.capture.inputs.calls import Call, take_named_tensors
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.base.wrapped import WrappedSource
from enginecast.capture.sources.calls.recording import Recorded
from enginecast.errors import UsageError


class CalledSource(WrappedSource):
    """The model of another source, which takes the inputs of a call."""

    def __init__(self, model: Source, call: Call) -> None:
        super().__init__(model)
        self.call = None if call.is_plain else call

    @property
    def _fingerprint(self) -> Mapping[str, str]:
        return self._model.fingerprint()

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return take_named_tensors(self._model.eager(dtype), self.call)

    def empty(self) -> nn.Module:
        return take_named_tensors(self._model.empty(), self.call)

    @property
    def forward_signature(self) -> inspect.Signature:
        return self._model.forward_signature if self.call is None else self.call.signature


class RecordedSource(CalledSource):
    """A folder's model whose inputs are those of recorded calls."""

    def __init__(self, model: Source, recorded: Recorded) -> None:
        found = model.model_class
        if found is not None and found.__name__ != recorded.model_class:
            raise UsageError(
                f"the recording is of {recorded.name}, a {recorded.model_class}, and the model is"
                f" a {found.__name__}"
            )
        super().__init__(model, recorded.call)
        self._example = recorded.example
        self.recorded = recorded.by_name
        self.notes = (*model.notes, *recorded.notes)
        # What was recorded are tensors.
        self.tokenizer_files, self.longest_text = (), None

    def example(self) -> dict[str, Tensor]:
        return dict(self._example)
