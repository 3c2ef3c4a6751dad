"""The file of results of the GPU benchmarks: rows, what is computed from them, the machine."""

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "torchao",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt-cu13",
    "torch-tensorrt",
    "numpy",
)
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


def machine(commit: str | None, device: str) -> dict[str, Any]:
    """What a reader needs to read the figures."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    found: dict[str, Any] = {
        "commit": commit or git.stdout.strip() or None,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_bytes"] = properties.total_memory
        found["capability"] = list(torch.cuda.get_device_capability())
        found["cuda"] = torch.version.cuda
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
