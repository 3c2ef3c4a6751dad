"""Join the inputs of several requests into one batch, and split its outputs again."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginecast.errors import UsageError
from enginecast.runtime.bundle.manifest import Input, Manifest, Output
from enginecast.runtime.size_checks import holds
from enginecast.runtime.validate import check_inputs
from enginecast.runtime.values.arrays import Array

DIFFERENCES = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Relative L2 error from which rows count as dependent on the other rows of a batch. Another order
of summation in a larger batch causes a hundredth of it."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The checked inputs of one request."""

    feeds: dict[str, Array]
    count: int
    width: int
    """Tokens per row, if columns of padding may be added; else 0."""
    key: Hashable
    """Requests with equal keys may run together."""


class Joining:
    """Rules for joining requests of one engine.

    Rows of unequal lengths are joined where the export proved that padding changes no other row;
    all other sizes have to be equal, and inputs without a batch the same.

    Raises:
        UsageError: an input or an output has no batch as its first dimension.
    """

    def __init__(self, manifest: Manifest, precision: str) -> None:
        self._manifest = manifest
        self._limit = DIFFERENCES[precision]
        self._batch = _batch_of(manifest)
        self.most = manifest.symbols[self._batch][1]
        """Rows of a batch."""
        padding = manifest.padding
        proved = padding is not None and {one.name for one in manifest.outputs} <= {
            *padding.outputs
        }
        self._padding = padding if proved else None
        self._tokens: int | str = ""
        if self._padding is not None:
            mask = next(one for one in manifest.inputs if one.name == self._padding.mask)
            self._tokens = mask.shape[1]

    def rows(self, feeds: Mapping[str, Any]) -> Rows:
        """Check the inputs of a request."""
        manifest = self._manifest
        checked = check_inputs(
            manifest.inputs,
            manifest.symbols,
            feeds,
            steps=manifest.steps,
            size_checks=manifest.size_checks,
        )
        arrays = {name: feed for name, feed in checked.items() if isinstance(feed, np.ndarray)}
        if len(arrays) < len(checked):
            raise UsageError("feeds: arrays in CPU memory are joined, got a tensor on a GPU")
        pads = self._may_pad(arrays)
        count, width = 0, 0
        key: list[Hashable] = [pads]
        for spec in manifest.inputs:
            array = arrays[spec.name]
            if self._batch not in spec.shape:
                key.append((array.shape, array.tobytes()))
                continue
            count = len(array)
            for declared, size in zip(spec.shape[1:], array.shape[1:], strict=True):
                if pads and declared == self._tokens:
                    width = size
                else:
                    key.append(size)
        return Rows(arrays, count, width, tuple(key))

    def join(self, group: Sequence[Rows]) -> dict[str, Array] | None:
        """The inputs of a batch; None if the engine cannot run these sizes together."""
        width = max(one.width for one in group)
        sizes = {self._batch: sum(one.count for one in group), str(self._tokens): width}
        named = (self._batch, str(self._tokens) or self._batch)
        for check in self._manifest.size_checks:  # on the sizes that a batch changes
            if any(name in check.condition for name in named) and not holds(check.condition, sizes):
                return None
        if sizes[self._batch] % self._manifest.steps.get(self._batch, 1):
            return None
        found = {}
        for spec in self._manifest.inputs:
            arrays = [one.feeds[spec.name] for one in group]
            if self._batch in spec.shape:
                found[spec.name] = np.concatenate([self._widened(a, spec, width) for a in arrays])
            else:
                found[spec.name] = arrays[0]
        return found

    def part(self, outputs: Mapping[str, Array], group: Sequence[Rows]) -> list[dict[str, Array]]:
        """The outputs of each request, as arrays of their own."""
        found, begin = [], 0
        for one in group:
            parts = {}
            for spec in self._manifest.outputs:
                if spec.name not in outputs:
                    continue
                rows = slice(begin, begin + one.count)
                columns = [
                    slice(one.width) if one.width and size == self._tokens else slice(None)
                    for size in spec.shape[1:]
                ]
                parts[spec.name] = outputs[spec.name][(rows, *columns)].copy()
            found.append(parts)
            begin += one.count
        return found

    def difference(self, rows: Rows, single: Mapping[str, Array], part: Mapping[str, Array]) -> str:
        """How a request's outputs differ alone and in a batch; empty if they agree."""
        for spec in self._manifest.outputs:
            one, other = (found[spec.name].astype(np.float64) for found in (single, part))
            if self._padding is not None and spec.shape[1:2] == (self._tokens,):
                valid = rows.feeds[self._padding.mask] != 0
                one, other = one[valid], other[valid]
            error, length = float(np.linalg.norm(one - other)), float(np.linalg.norm(one))
            if not error <= self._limit * length:
                share = f"{error / length:.1e} of its length" if length else f"{error:.1e}"
                return f"output {spec.name!r} by {share}"
        return ""

    def _may_pad(self, feeds: Mapping[str, Array]) -> bool:
        """Whether columns of padding may be added on the right of a request."""
        if self._padding is None:
            return False
        mask = feeds[self._padding.mask]
        if not ((mask == 0) | (mask == 1)).all() or not mask.any(1).all():
            return False
        # No token comes after padding, unless padding is proved to be harmless anywhere.
        return self._padding.side == "any" or bool((mask[:, :-1] >= mask[:, 1:]).all())

    def _widened(self, array: Array, spec: Input, width: int) -> Array:
        """An input with columns of padding up to a width."""
        widths = [
            (0, width - size if width and declared == self._tokens else 0)
            for declared, size in zip(spec.shape, array.shape, strict=True)
        ]
        if not any(after for _, after in widths):
            return array
        text = self._manifest.text
        filling = text.padding_id if text is not None and spec.kind == "token_ids" else 0
        return np.pad(array, widths, constant_values=filling)


def _batch_of(manifest: Manifest) -> str:
    """The symbol of the batch."""
    found = {one.shape[0] for one in manifest.inputs if one.shape} & manifest.symbols.keys()
    every: list[Input | Output] = [*manifest.inputs, *manifest.outputs]
    for symbol in sorted(str(one) for one in found):
        inside = [one for one in every if symbol in one.shape[1:]]
        without = [one.name for one in manifest.outputs if one.shape[:1] != (symbol,)]
        if not inside and not without:
            return symbol
    shapes = ", ".join(f"{one.name} [{', '.join(map(str, one.shape))}]" for one in every)
    raise UsageError(
        f"expected a batch of any size as the first dimension of inputs and of every output, got"
        f" {shapes}",
        hint="Run this engine without a batcher.",
    )
