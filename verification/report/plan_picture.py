"""Draw a quantization plan: bytes, error and gain, one row per layer or group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from enginecast.verification.report.data import Plan, PlannedLayer
from enginecast.verification.report.html import Html, join, tag

ROWS = 48
"""Most rows; of more layers, those of one block share a row, or else those that save least are left
out of the picture."""
ROW, LEFT, WIDTH = 18, 250, 900
"""Height of a row, room for names, and all of it."""
BYTES, ERROR, GAIN = (LEFT, 300), (LEFT + 330, 180), (LEFT + 540, 110)
"""Where a column begins, and how wide it is."""
NAME = 36
"""Characters of a name."""


@dataclass(frozen=True)
class _Row:
    name: str
    layers: tuple[PlannedLayer, ...]

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


def draw_plan(plan: Plan) -> Html:
    """Bars for bytes before and after, a dot for the error, a bar for the gain."""
    rows, left = _rows(plan.layers)
    height = 34 + ROW * len(rows) + 6
    most = max((row.before for row in rows), default=1) or 1
    errors = [row.error for row in rows if row.error]
    low = math.floor(math.log10(min(errors))) if errors else -3
    high = max(low + 1, math.ceil(math.log10(max(errors)))) if errors else 0
    gains = max([row.gain or 1.0 for row in rows] + [1.5])
    picture = tag(
        "svg",
        tag("text", "weights: before, after", x=BYTES[0], y=14),
        tag("text", f"error of the layer, 1e{low} to 1e{high}", x=ERROR[0], y=14),
        tag("text", f"times faster: 1, {gains:.1f}", x=GAIN[0], y=14),
        *(
            tag("line", x1=x, x2=x, y1=22, y2=height - 4, class_="grid")
            for x in (ERROR[0], ERROR[0] + ERROR[1], GAIN[0] + GAIN[1] / gains)
        ),
        *(_row(row, 30 + ROW * i, most, (low, high), gains) for i, row in enumerate(rows)),
        class_="picture",
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label="bytes, error and gain of each layer",
        style="min-width:640px",
    )
    note = f"{left} layers with the smallest weights are in the table alone" if left else None
    return join(
        (
            tag("div", picture, class_="scroll", tabindex=0),
            tag("p", note, class_="quiet") if note else None,
        )
    )


def _rows(layers: Sequence[PlannedLayer]) -> tuple[list[_Row], int]:
    """A row a layer, or one for each kind of layer in equal blocks where there are many."""
    rows = [_Row(layer.module or layer.kind, (layer,)) for layer in layers]
    if len(rows) > ROWS:
        together: dict[str, list[PlannedLayer]] = {}
        for layer in layers:
            parts = layer.module.split(".")
            name = ".".join("*" if part.isdigit() else part for part in parts)
            together.setdefault(name or layer.kind, []).append(layer)
        rows = [
            _Row(f"{len(same)}x {name}" if len(same) > 1 else name, tuple(same))
            for name, same in together.items()
        ]
    kept = set(sorted(range(len(rows)), key=lambda i: -rows[i].before)[:ROWS])
    shown = [row for index, row in enumerate(rows) if index in kept]
    return shown, sum(len(row.layers) for row in rows) - sum(len(row.layers) for row in shown)


def _row(row: _Row, y: int, most: int, decades: tuple[int, int], gains: float) -> Html:
    low, high = decades
    drawn = [
        tag("title", row.title),
        tag("rect", x=0, y=y - 2, width=WIDTH, height=ROW, fill="transparent"),
        tag("text", _cut(row.name), x=LEFT - 10, y=y + 10, text_anchor="end", class_="name"),
        tag("rect", x=BYTES[0], y=y, width=BYTES[1] * row.before / most, height=5, class_="before"),
        tag(
            "rect",
            x=BYTES[0],
            y=y + 6,
            width=BYTES[1] * row.after / most,
            height=5,
            class_="kept" if row.is_kept else "after",
        ),
    ]
    if row.error:
        share = (math.log10(row.error) - low) / (high - low)
        x = ERROR[0] + ERROR[1] * min(1.0, max(0.0, share))
        drawn.append(tag("circle", cx=x, cy=y + 6, r=4, class_="dot"))
    if row.gain and not row.is_kept:
        width = GAIN[1] * row.gain / gains
        drawn.append(tag("rect", x=GAIN[0], y=y + 2, width=width, height=7, class_="gain"))
    return tag("g", *drawn)


def _cut(text: str) -> str:
    """The end of a name says most, and whole parts of it are read best."""
    parts = text.split(".")
    while len(parts) > 1 and len(".".join(parts)) > NAME:
        parts = parts[1:]
    return ".".join(parts)[-NAME:]
