"""Run an engine without the work on padding, and put its outputs back in place.

This is done only if the manifest guarantees that no valid row changes (`Padding`). Columns that are
padding in every row are cut off, and rows of very different lengths run separately. Rows of padding
are returned as zeros, whatever was cut, so that a row's result does not depend on the other rows.

Rows without padding are independent, and many of them run in groups: a layer's output for some
hundred tokens stays in a core's caches, and for thousands it does not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from enginecast.runtime.bundle.manifest import Manifest, Padding
from enginecast.runtime.size_checks import holds
from enginecast.runtime.values.arrays import Array
from enginecast.runtime.values.device_tensor import Feed

PadRows = Literal["exact", "zero"]
"""Rows of padding as the engine computes them, or zeros."""
CALL_TOKENS = 24
"""Tokens whose products take as long as one call takes to read all weights from memory: about ten
bytes and a hundred products pass a core in a nanosecond, see padding-4-layers-*.json in
benchmarks/results."""
CALL_PRODUCTS = 2e7
"""Multiplications in the time of an empty call."""
MOST_LENGTHS = 32
"""Most distinct lengths when rows are grouped."""
GPU_STEP = 64
"""On a GPU, widths are multiples of this: each width may need a CUDA graph or a kernel choice."""
GROUP_TOKENS = 512
"""Tokens per thread in a group of rows: see benchmarks/results/row-groups.json."""
MOST_GROUPED_BYTES = 2**29
"""Most bytes of weights, which each group reads again: groups were measured up to this."""
Run = Callable[[Mapping[str, Feed]], dict[str, Array]]


@dataclass(frozen=True)
class Piece:
    """Rows that run together, and the columns that they need."""

    rows: NDArray[np.int64]
    start: int
    stop: int


class Trimming:
    """Rules for trimming the calls of one engine.

    Args:
        on_gpu: whether the engine runs on a GPU; its calls are not split.
        group_tokens: rows run in groups of about this many tokens; 0: together.
    """

    def __init__(
        self, manifest: Manifest, padding: Padding, *, on_gpu: bool, group_tokens: int = 0
    ) -> None:
        mask = next(spec for spec in manifest.inputs if spec.name == padding.mask)
        self._manifest, self._padding = manifest, padding
        self._batch, self._tokens = mask.shape
        self._least, self._most = manifest.symbols[str(self._tokens)]
        step = manifest.steps.get(str(self._tokens), 1)
        self._step = lcm(step, GPU_STEP) if on_gpu else step
        rows = manifest.symbols.get(str(self._batch), (0, 0))
        free = str(self._batch) not in manifest.steps
        self._splits = rows[0] == 1 < rows[1] and free and not on_gpu
        weights = {engine.weights for engine in manifest.engines}
        size = sum(file.size for file in manifest.files if file.name in weights)
        self._call = CALL_TOKENS + CALL_PRODUCTS / max(1, size // 4)
        self._group_tokens = group_tokens if size < MOST_GROUPED_BYTES else 0

    def reason(self, outputs: Sequence[str]) -> str:
        """Why these outputs may depend on padding; empty if they do not."""
        found = self._padding.reasons
        return next((f"output {name!r}: {found[name]}" for name in outputs if name in found), "")

    def is_large(self, feeds: Mapping[str, Feed]) -> bool:
        """Whether rows without padding run in groups."""
        mask = feeds[self._padding.mask]
        assert isinstance(mask, np.ndarray)
        return self._splits and 2 * mask.size >= 3 * self._group_tokens > 0

    def run(self, run: Run, feeds: Mapping[str, Feed], *, zero: bool = True) -> dict[str, Array]:
        """Run without padding; rows of padding are returned as zeros.

        Args:
            run: runs the engine on some rows and columns.
            feeds: all inputs, in CPU memory.
            zero: whether padding may be left out; if False, a batch with padding runs whole.
        """
        mask = feeds[self._padding.mask]
        assert isinstance(mask, np.ndarray)
        padded = not mask.all()
        pieces = self.pieces(mask) if zero or not padded else ()
        whole = len(pieces) < 2 and all(p.stop - p.start == mask.shape[1] for p in pieces)
        found = [run(feeds)] if whole else [run(self._cut(feeds, piece)) for piece in pieces]
        # What no piece covers is never written: its zeros are pages that the system maps when read.
        shown = [mask] if whole else [mask[p.rows, p.start : p.stop] for p in pieces]
        shapes = {output.name: output.shape for output in self._manifest.outputs}
        outputs = {}
        for name in found[0]:
            parts = [part[name] for part in found]
            has_tokens = self._tokens in shapes[name]
            if has_tokens and zero and padded:
                parts = [part if part.flags.writeable else part.copy() for part in parts]
                for part, valid in zip(parts, shown, strict=True):
                    part[valid == 0] = 0
            outputs[name] = parts[0]
            if not whole:
                head = mask.shape if has_tokens else mask.shape[:1]
                shape = (*head, *parts[0].shape[len(head) :])
                outputs[name] = joined = np.zeros(shape, parts[0].dtype)
                for part, piece in zip(parts, pieces, strict=True):
                    columns = (slice(piece.start, piece.stop),) if has_tokens else ()
                    joined[(piece.rows, *columns)] = part
        return outputs

    def pieces(self, mask: Array) -> tuple[Piece, ...]:
        """The rows of a mask in groups, each with the columns that it runs with."""
        count, width = mask.shape
        everything = (Piece(np.arange(count), 0, width),)
        valid = mask != 0
        lengths = valid.sum(1)
        fits = lengths > 0
        first, last = valid.argmax(1), width - valid[:, ::-1].argmax(1)
        if self._padding.side == "right":
            fits &= last == lengths
            first = np.zeros_like(first)
        plain = mask.dtype == np.bool_ or ((mask == 0) | (mask == 1)).all()
        if not plain or not (fits.all() or (fits.any() and self._splits)):
            return everything
        cut = np.flatnonzero(fits)
        order = cut[np.lexsort((cut, (last - first)[cut]))]
        groups = self._grouped(order, first, last) if self._splits else [order]
        if self._splits and self._group_tokens:  # groups of about so many, as equal as can be
            split = []
            for rows in groups:
                wide = int(last[rows].max() - first[rows].min())
                parts = round(len(rows) * wide / self._group_tokens)
                split += np.array_split(rows, min(max(1, parts), len(rows)))
            groups = split
        pieces = [self._piece(np.sort(rows), first, last, width) for rows in groups]
        if not fits.all():
            pieces.append(self._piece(np.flatnonzero(~fits), first * 0, last * 0 + width, width))
        return everything if None in pieces else tuple(p for p in pieces if p is not None)

    def _grouped(
        self, order: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        """Rows by length, split where an additional call costs less than the padding it saves."""
        lengths = (last - first)[order]
        changes = [0, *np.flatnonzero(np.diff(lengths)) + 1, len(order)]
        if len(changes) > MOST_LENGTHS + 1:
            places = np.linspace(0, len(changes) - 1, MOST_LENGTHS + 1).round().astype(int)
            changes = [changes[place] for place in places]
        best: list[tuple[float, int]] = [(0.0, 0)]
        for end in range(1, len(changes)):
            costs = []
            for begin in range(end):
                rows = order[changes[begin] : changes[end]]
                wide = int(last[rows].max() - first[rows].min())
                costs.append((best[begin][0] + len(rows) * wide + self._call, begin))
            best.append(min(costs))
        groups, end = [], len(changes) - 1
        while end > 0:
            begin = best[end][1]
            groups.append(order[changes[begin] : changes[end]])
            end = begin
        return groups[::-1]

    def _piece(
        self,
        rows: NDArray[np.int64],
        first: NDArray[np.int64],
        last: NDArray[np.int64],
        width: int,
    ) -> Piece | None:
        """These rows with columns that the engine accepts; None: there are none."""
        start, stop = int(first[rows].min()), int(last[rows].max())
        wide = max(stop - start, self._least)
        wide = min(wide + -wide % self._step, width)
        sizes = {str(self._batch): len(rows)}
        while not all(
            holds(check.condition, {**sizes, str(self._tokens): wide})
            for check in self._manifest.size_checks
        ):
            wide += self._step
            if wide > width:
                return None
        start = min(start, width - wide)
        return Piece(rows, start, start + wide)

    def _cut(self, feeds: Mapping[str, Feed], piece: Piece) -> dict[str, Feed]:
        """The feeds of some rows, without unneeded columns."""
        found: dict[str, Feed] = {}
        for spec in self._manifest.inputs:
            array = feeds[spec.name]
            assert isinstance(array, np.ndarray)
            for axis, size in enumerate(spec.shape):
                if size == self._batch and self._splits:
                    array = array.take(piece.rows, axis)
                elif size == self._tokens:
                    array = array[(slice(None),) * axis + (slice(piece.start, piece.stop),)]
            found[spec.name] = np.ascontiguousarray(array)
        return found
