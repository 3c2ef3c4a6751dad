"""Whether what stands in padded positions reaches the rows that count.

A mask that is lost moves the output of a small or well-conditioned model by less than fp16's own
error, and then no comparison with eager can see it.  An engine compared with itself has no such
noise: when only padding differs, the rows that count may not.
"""

from collections.abc import Mapping, Sequence

from enginecast.verify.metrics import Array, measure, row_mask

UNCHANGED = 1e-12
"""Relative change of an fp64 output below which padding has no part in it."""


def padded_case(masks: Mapping[str, Array | None]) -> str | None:
    """The smallest case that has padding beside rows that count.

    Args:
        masks: attention mask by case name.
    """
    fitting = {
        name: mask.size
        for name, mask in masks.items()
        if mask is not None and bool((mask == 0).any()) and bool((mask != 0).any())
    }
    return min(fitting, key=lambda name: fitting[name], default=None)


def other_padding(inputs: Mapping[str, Array], mask_input: str) -> dict[str, Array]:
    """The same inputs, but for integers in padded positions: they become the largest in use.

    Args:
        inputs: of one case; those with the mask's leading dimensions have padding.
        mask_input: the attention mask, which stays as it is.
    """
    changed = dict(inputs)
    for name, array in inputs.items():
        pads = row_mask(array.shape, inputs[mask_input])
        if name != mask_input and pads is not None and array.dtype.kind in "iu":
            changed[name] = array.copy()
            changed[name][~pads] = array.max()
    return changed


def moved(
    before: Mapping[str, Array], after: Mapping[str, Array], mask: Array, names: Sequence[str]
) -> dict[str, float]:
    """Relative change of the rows that count, by output.

    Raises:
        VerificationError: a shape differs.
    """
    return {
        name: measure(after[name], before[name], row_mask(before[name].shape, mask)).relative
        for name in names
    }
