"""A model that is not called through its plain `forward`: as recorded, or with constants."""

import inspect
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from enginecast.capture.inputs.calls import Call, Fixed, Slot, take_named_tensors
from enginecast.capture.inputs.derive.from_facts import from_facts
from enginecast.capture.inputs.derive.known_inputs import grid_of
from enginecast.capture.inputs.derive.model_facts import GRIDS, ModelFacts
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


SIZES = (*GRIDS, "video_grid_thw", "spatial_shapes", "target_sizes", "merge_sizes")
"""Whole numbers of patches, or how many of them become one, by image."""


def with_sizes(source: Source, given: Mapping[str, Tensor]) -> Source:
    """The source with its image sizes as constants, if it takes any.

    Args:
        given: the user's tensors by input; empty: the grid comes from the config.
    """
    if source.config is None or source.call is not None or source.example():
        return source
    if given:
        sizes = {n: Fixed.of(t) for n, t in given.items() if n in SIZES and _is_whole(t)}
        names = [name for name in source.forward_arguments if name in given]
    else:
        facts = source.facts(source.config)
        # The required grid for one square image.
        grid = grid_of(facts)
        sizes = {
            name: Fixed((grid,)) for name in facts.required if name in GRIDS and grid is not None
        }
        names = _inputs(replace(facts, fixed=sizes)) if sizes else []
    names = [name for name in names if name not in sizes]
    if not sizes or not names:
        return source
    return CalledSource(source, Call({**{name: Slot(name) for name in names}, **sizes}))


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() > 0


def _inputs(facts: ModelFacts) -> list[str]:
    try:
        return [spec.name for spec in from_facts(facts)]
    except UsageError:
        return []  # `derive` says what is missing
