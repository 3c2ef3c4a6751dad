"""The table of pipelines in docs/results/diffusion.md, from campaigns/diffusion/results.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import DOCS, Store, cell, table, versions

STORE = Store(
    Path(__file__).with_name("results.json"),
    under="pipelines",
    libraries=("torch", "transformers", "diffusers", "onnxruntime"),
)
PAGE = DOCS / "results" / "diffusion.md"
BEGIN, END = "<!-- make diffusion -->", "<!-- end of make diffusion -->"
COLUMNS = (
    *("pipeline", "class", "engines", "in PyTorch", "verdict", "worst step", "allowed"),
    *("PSNR of the pictures", "recorded at", "runs", "reason"),
)


def render(found: Mapping[str, Any]) -> str:
    """The part of the page."""
    rows = found["pipelines"]
    lines = [
        "",
        versions(found),
        "",
        *table(COLUMNS, (_cells(name, row) for name, row in rows.items())),
        "",
    ]
    return "\n".join(lines)


def _cells(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    eager = "; ".join(f"{part}: {cell(why, 150)}" for part, why in row["eager"].items())
    psnr = "equal" if row["psnr"] is None else f"{row['psnr']:.1f} dB"
    is_made = row["worst"] is not None
    return (
        *(f"`{name}`", row["kind"], row["engines"], eager, row["outcome"]),
        *((f"{row['worst']:.1e}", f"{row['allowed']:.1e}", psnr) if is_made else ("", "", "")),
        " and ".join(f"{height} x {width}" for height, width in sorted(row["sizes"])),
        "yes" if row["runs"] else "no",
        cell(row["reason"], 300),
    )
