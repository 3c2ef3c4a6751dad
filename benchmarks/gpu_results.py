"""The file of results of the GPU benchmarks: rows, and what is computed from them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COMPILED = "torch.compile bf16"
FP8_ENGINES = ("torchao fp8", "enginecast fp8")


@dataclass
class Results:
    """The file, written anew after every row."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        text = json.dumps(self.content, indent=1, sort_keys=True) + "\n"
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.path)


def failures(content: Mapping[str, Any]) -> list[str]:
    """Names of rows that should be there and are not."""
    return [
        f"{case} {name}"
        for case, found in content["cases"].items()
        for name, row in found["engines"].items()
        if "failed" in row
    ]


def distance(output: Tensor, reference: Tensor, valid: Tensor) -> tuple[float, float]:
    """Relative L2 error over the valid rows, and the lowest cosine of one of them."""
    found, wanted = output.cpu().float()[valid], reference[valid]
    error = (found - wanted).norm() / wanted.norm()
    cosine = torch.nn.functional.cosine_similarity(found, wanted, dim=-1).min()
    return float(f"{error.item():.4g}"), round(cosine.item(), 6)


def compare(rows: Mapping[str, dict[str, Any]], floor: Mapping[str, float]) -> None:
    """Ratios between rows, and to the floor of their products."""
    base = rows.get(COMPILED, {}).get("ms")
    for name, row in rows.items():
        if "ms" not in row:
            continue
        if base is not None:
            row["over_compiled"] = round(base / row["ms"], 3)
        if floor:
            form = "fp8_row" if name in FP8_ENGINES else "bf16"
            row["of_floor"] = round(floor[form] / row["ms"], 3)


def show(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """A short table for people."""
    print(title)
    for name, row in rows.items():
        details = row.get("absent") or row.get("failed") or row.get("stopped")
        details = details or "  ".join(
            f"{key} {row[key]}"
            for key in ("ms", "over_compiled", "of_floor", "error")
            if key in row
        )
        print(f"  {name:20} {details}", flush=True)
