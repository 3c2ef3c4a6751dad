"""Draw values that fit one another as those of the example do.

Some values fail alone: offsets rise from 0, as many tokens are placeholders as an image has rows, a
mask selects equally many elements of each row, probabilities sum to 1.  What fits is drawn from the
example:

    marked      any values, but those that mark something as often in each row as in the example
    sorted      any values, sorted along the last dimension
    between     sorted integers, of which the first and the last are the example's
    values      each value is one of the example
    shuffled    each row holds the values of one of the example's rows, in another order
    rows        each row is one of the example, a row being a vector along the last dimension
    samples     each sample is one of the example, a sample being all that has one first index
    kept        the example itself

Other sizes repeat or leave out what is between the first and the last.
"""

import torch
from torch import Tensor

from enginecast.capture.inputs.specs import InputSpec


def is_sorted(values: Tensor) -> bool:
    """Whether values rise or fall along the last dimension, and are not all equal."""
    if values.ndim == 0 or values.shape[-1] < 2 or values.is_complex():
        return False
    steps = values.to(torch.float64).diff()
    return bool(steps.any()) and bool((steps >= 0).all() or (steps <= 0).all())


def in_order(values: Tensor, spec: InputSpec) -> Tensor:
    """Values sorted as the example is."""
    assert spec.held is not None
    falls = bool((spec.held.to(torch.float64).diff() <= 0).all())
    return values.sort(-1, descending=falls).values


def fitting(spec: InputSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values of the given shape, drawn from the example as `spec.draws` says."""
    assert spec.held is not None
    held = spec.held.to(spec.dtype)
    for dim, size in enumerate(shape):
        places = torch.linspace(0, held.shape[dim] - 1, size).round().long()
        held = held.index_select(dim, places)
    if spec.draws == "kept" or not held.numel() or not shape:
        return held
    if spec.draws == "between":
        first, last = held[..., :1].double(), held[..., -1:].double()
        steps = torch.rand(shape, generator=generator, dtype=torch.float64).sort(-1).values
        drawn = (first + (last - first) * steps).round().to(held.dtype)
        drawn[..., :1], drawn[..., -1:] = held[..., :1], held[..., -1:]
        return drawn
    if spec.draws == "values":
        places = torch.randint(held.numel(), shape, generator=generator)
        return held.flatten()[places]
    if spec.draws == "shuffled":
        order = torch.rand(shape, generator=generator).argsort(-1)
        return held.gather(-1, order)
    is_vectors = spec.draws == "rows" and len(shape) > 1
    rows = held.reshape(-1, shape[-1]) if is_vectors else held
    places = torch.randint(rows.shape[0], (rows.shape[0],), generator=generator)
    return rows[places].reshape(shape)


def with_marks(
    values: Tensor, spec: InputSpec, mask: Tensor | None, generator: torch.Generator
) -> Tensor:
    """Values with the marks of the example's rows, in their order, and with no other marks.

    Args:
        values: any ones.
        mask: False where there is padding, which marks nothing.
    """
    held = spec.held
    if held is None or not values.ndim or not values.numel() or not held.numel():
        return values
    marks = torch.tensor(sorted(spec.marks))
    others = held[~torch.isin(held.long(), marks)]
    is_mark = torch.isin(values.long(), marks)
    if others.numel():
        drawn = others[torch.randint(others.numel(), values.shape, generator=generator)]
        values = torch.where(is_mark, drawn.to(values.dtype), values)
    rows = values.reshape(-1, values.shape[-1]).clone()
    examples = held.reshape(-1, held.shape[-1])
    is_real = None if mask is None or mask.shape != rows.shape else mask
    for index, row in enumerate(rows):
        example = examples[index % len(examples)]
        wanted = example[torch.isin(example.long(), marks)]
        free = torch.arange(len(row)) if is_real is None else is_real[index].nonzero().flatten()
        chosen = torch.randperm(len(free), generator=generator)[: len(wanted)].sort().values
        row[free[chosen]] = wanted[: len(chosen)].to(row.dtype)
    return rows.reshape(values.shape)
