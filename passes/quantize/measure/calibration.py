"""Calibration inputs that a plan can be measured on, and which rows of them count."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import same_shape
from enginecast.passes.ir.match import behind_casts
from enginecast.passes.quantize.measure.quantizable import find_layers

Outputs = Sequence[Mapping[str, Tensor]]
"""By name, for each case."""
GIVE = "Give inputs as the model gets them: --prompts FILE or --inputs FILE."


def check_calibration(program: ExportedProgram, context: PassContext) -> None:
    """Refuse inputs that errors cannot be measured on.

    Raises:
        PassError: there are none, an input is missing or not finite, an id is beyond its embedding,
            or the mask leaves out every row; names the input.
    """
    if not context.calibration:
        raise PassError("there are no calibration inputs to measure errors on", hint=GIVE)
    embeddings = {
        behind_casts(ids).name: layer
        for layer in find_layers(program)
        if layer.kind == "embedding" and isinstance(ids := layer.node.args[1], Node)
    }
    for place, case in enumerate(context.calibration):
        for name in program.graph_signature.user_inputs:
            what, given = f"calibration inputs {place}: {name!r}", case.get(name)
            if name not in case:
                raise PassError(f"{what} is missing", hint=GIVE)
            if not isinstance(given, Tensor):
                continue
            if given.is_floating_point() and not bool(given.isfinite().all()):
                raise PassError(f"{what} holds values that are not finite", hint=GIVE)
            if name not in embeddings or not given.numel():
                continue
            rows, least, most = embeddings[name].shape[0], int(given.min()), int(given.max())
            if least < 0 or most >= rows:
                wrong = least if least < 0 else most
                raise PassError(
                    f"{what} holds the id {wrong}, and {embeddings[name].name} has {rows} rows",
                    hint="It comes from another vocabulary than the model's.",
                )
    mask = context.mask_input
    if mask is None:
        return
    if mask not in context.calibration[0]:
        raise PassError(f"the calibration inputs have no mask {mask!r}", hint=GIVE)
    if not any(bool((case[mask] != 0).any()) for case in context.calibration):
        raise PassError(
            f"the calibration inputs are padding alone: {mask!r} is 0 everywhere", hint=GIVE
        )


def masks_of(context: PassContext) -> list[Tensor | None]:
    """For each case which positions count; None: all do."""
    name = context.mask_input
    return [None if name is None else case[name] != 0 for case in context.calibration]


def valid_rows(value: Tensor, mask: Tensor | None) -> Tensor:
    """The vectors along the last dim that count, [rows, size].

    Args:
        value: [..., size] whose leading dims are the mask's, or the mask's flattened; of any other
            shape all rows count.
        mask: bool, e.g. [batch, tokens].
    """
    if value.dim() == 0:
        return value.reshape(1, 1)
    if mask is None:
        return value.reshape(-1, value.shape[-1])
    if same_shape(value.shape[: mask.dim()], mask.shape):
        chosen = value[mask]
        return chosen.reshape(-1, value.shape[-1]) if value.dim() > mask.dim() else chosen[:, None]
    if value.dim() == 2 and value.shape[0] == mask.numel():
        return value[mask.flatten()]
    return value.reshape(-1, value.shape[-1])


class ErrorSum:
    """A relative L2 error over cases, without what is not finite on both sides."""

    def __init__(self) -> None:
        self._error = 0.0
        self._size = 0.0

    def add(self, found: Tensor, wanted: Tensor) -> None:
        """Two tensors of one shape."""
        found, wanted = found.double(), wanted.double()
        same = (found == wanted) | (found.isnan() & wanted.isnan())
        self._error += float(torch.where(same, 0.0, found - wanted).square().sum())
        self._size += float(torch.where(wanted.isfinite(), wanted, 0.0).square().sum())

    @property
    def absolute(self) -> float:
        """The L2 norm of the difference."""
        return math.sqrt(self._error)

    @property
    def relative(self) -> float:
        """At most `BEYOND`, which is also what NaN and a reference of zeros give."""
        if self._error == 0:
            return 0.0
        ratio = (self._error / self._size) ** 0.5 if self._size else BEYOND
        return min(ratio, BEYOND) if ratio == ratio else BEYOND


SMALL_ROW = 0.1
"""Of the median row: what is shorter is measured against that."""
BEYOND = 1e30
"""A relative error that stands for no agreement at all; JSON has no infinity."""


def largest_row_error(found: Outputs, wanted: Outputs, masks: Sequence[Tensor | None]) -> float:
    """The largest of `row_errors`."""
    return max(row_errors(found, wanted, masks))


def row_errors(found: Outputs, wanted: Outputs, masks: Sequence[Tensor | None]) -> list[float]:
    """For each case the relative L2 error of the row that is worst, of the rows of an output that
    count: beside a token that is loud, another one could be anything.  A row of next to nothing is
    measured against a tenth of the median one.

    Outputs that hold no floats have no such error.
    """
    largest = [0.0] * len(wanted)
    lengths = {mask.shape[1:] for mask in masks if mask is not None}
    for name, first in wanted[0].items():
        if not first.is_floating_point():
            continue
        # An output follows the mask if it has a row for each position in every case, through
        # several lengths: one may have as many by accident.
        follows = len(lengths) > 1 and all(
            mask is not None and same_shape(case[name].shape[: mask.dim()], mask.shape)
            for case, mask in zip(wanted, masks, strict=True)
        )
        for case, (outputs, exact, mask) in enumerate(zip(found, wanted, masks, strict=True)):
            counted = mask if follows else None
            rows, right = (valid_rows(each[name], counted).double() for each in (outputs, exact))
            sizes = right.norm(dim=-1)
            shown = sizes[sizes > 0]
            least = SMALL_ROW * (shown.median() if len(shown) else sizes.new_zeros(()))
            tiny = torch.finfo(torch.float64).tiny
            ratios = (rows - right).norm(dim=-1) / sizes.maximum(least).clamp(min=tiny)
            if len(ratios):
                largest[case] = max(largest[case], float(ratios.nan_to_num(BEYOND).amax()))
    return largest
