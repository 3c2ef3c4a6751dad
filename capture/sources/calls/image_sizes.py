"""Arguments that give image sizes: they decide the sizes of other tensors.

A model that takes images cut into patches reads their grid in Python, so that an engine is for one
grid.  The grid is then part of the engine, as a number would be.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from enginecast.capture.inputs.calls import Call, Fixed, Slot
from enginecast.capture.inputs.derive.from_facts import from_facts
from enginecast.capture.inputs.derive.known_inputs import grid_of
from enginecast.capture.inputs.derive.model_facts import GRIDS, ModelFacts
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.calls.recorded import CalledSource
from enginecast.errors import UsageError

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
