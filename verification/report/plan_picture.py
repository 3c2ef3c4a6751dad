"""The rows of the picture of a quantization plan: bytes, error and gain of each layer or group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from enginecast.verification.report.data import Plan, PlannedLayer

ROWS = 48
"""Most rows; of more layers, those of one block share a row, or else those that save least are left
out of the picture."""
NAME = 36
"""Characters of a name."""


@dataclass(frozen=True)
class PlanRow:
    """A layer, or equal layers of several blocks."""

    name: str
    layers: tuple[PlannedLayer, ...]

    @property
    def short_name(self) -> str:
        """The end of a name says most, and whole parts of it are read best."""
        parts = self.name.split(".")
        while len(parts) > 1 and len(".".join(parts)) > NAME:
            parts = parts[1:]
        return ".".join(parts)[-NAME:]

    @property
    def before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def after(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    @property
    def error(self) -> float | None:
        return max((x.error for x in self.layers if x.error is not None), default=None)

    @property
    def gain(self) -> float | None:
        """Of the layers together, each as long as it has weights: a geometric mean."""
        known = [(x.bytes_before, x.gain) for x in self.layers if x.gain]
        total = sum(count for count, _ in known)
        return math.exp(sum(c * math.log(g) for c, g in known) / total) if total else None

    @property
    def is_slower(self) -> bool:
        """Whether a layer is slower than what it replaces, whatever the others are."""
        return any((x.gain or 1.0) < 1 for x in self.layers if x.choice != "keep")

    @property
    def is_estimated(self) -> bool:
        """Whether a gain of it comes from a cost model, and was not measured."""
        return any(x.gain_from == "model" for x in self.layers if x.choice != "keep")

    @property
    def is_kept(self) -> bool:
        return all(layer.choice == "keep" for layer in self.layers)

    @property
    def title(self) -> str:
        error = "unknown" if self.error is None else f"{self.error:.2g}"
        gain = "unknown" if self.gain is None else f"{self.gain:.2f}x"
        choices = ", ".join(dict.fromkeys(layer.choice for layer in self.layers))
        return (
            f"{self.name}: {choices}, {self.before:,} to {self.after:,} bytes, error {error},"
            f" gain {gain}"
        )


@dataclass(frozen=True)
class PlanPicture:
    """The rows, and the ends of their axes."""

    rows: Sequence[PlanRow]
    left_out: int
    """Layers."""
    most: int
    """Bytes."""
    low: int
    """Powers of ten of the errors."""
    high: int
    gains: float

    def share(self, error: float) -> float:
        """Where an error stands on its axis, from 0 to 1."""
        return min(1.0, max(0.0, (math.log10(error) - self.low) / (self.high - self.low)))


def plan_picture(plan: Plan) -> PlanPicture:
    """A row a layer, or one for each kind of layer in equal blocks where there are many."""
    layers = plan.layers
    rows = [PlanRow(layer.module or layer.kind, (layer,)) for layer in layers]
    if len(rows) > ROWS:
        together: dict[str, list[PlannedLayer]] = {}
        for layer in layers:
            parts = layer.module.split(".")
            name = ".".join("*" if part.isdigit() else part for part in parts)
            together.setdefault(name or layer.kind, []).append(layer)
        rows = [
            PlanRow(f"{len(same)}x {name}" if len(same) > 1 else name, tuple(same))
            for name, same in together.items()
        ]
    kept = set(sorted(range(len(rows)), key=lambda i: -rows[i].before)[:ROWS])
    rows = [row for index, row in enumerate(rows) if index in kept]
    errors = [row.error for row in rows if row.error]
    low = math.floor(math.log10(min(errors))) if errors else -3
    return PlanPicture(
        rows=rows,
        left_out=len(layers) - sum(len(row.layers) for row in rows),
        most=max((row.before for row in rows), default=1) or 1,
        low=low,
        high=max(low + 1, math.ceil(math.log10(max(errors)))) if errors else 0,
        gains=max([row.gain or 1.0 for row in rows] + [1.5]),
    )
