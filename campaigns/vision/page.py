"""docs/results/vision.md from campaigns/vision/results.json."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import DOCS, Store, cell, table, versions

STORE = Store(
    Path(__file__).with_name("results.json"),
    under="models",
    libraries=(
        *("torch", "torchvision", "timm", "open-clip-torch", "lightning", "onnx", "onnxruntime"),
    ),
)
read, merge = STORE.read, STORE.merge
PAGE = DOCS / "results" / "vision.md"
COLUMNS = (
    *("family", "model", "parameters", "fp32", "engine", "sizes", "mutation", "fp16", "seconds"),
    "reason",
)
HEAD = """\
# Vision

`make vision` exports models of torchvision, timm, open_clip and Lightning through a factory
(`campaigns/vision/models.py`). They are tiny or run on small images, with random weights.

* **fp32**: *verified* means that a second comparison agreed, too: the published engine ran on fresh
  inputs, in other sizes if they vary, and was compared with eager by another measure. An engine
  that differs there is *silently wrong*.
* **engine**: ONNX Runtime or TorchScript.
* **sizes**: which dimensions vary, and how many inputs were compared.
* **mutation**: whether `enginecast verify` notices that the largest weight lost a quarter of its
  rows.
* **fp16**: the verdict in true fp16 arithmetic; none of these engines has run on a GPU.
"""


def render(found: Mapping[str, Any]) -> str:
    """The page."""
    models = found["models"]
    ended = Counter(row["fp32"] for row in models.values())
    by_family = sorted(models.items(), key=lambda item: (item[1]["family"], item[0]))
    lines = [
        HEAD,
        versions(found),
        "",
        f"{len(models)} models: {', '.join(f'{count} {name}' for name, count in ended.items())}.",
        "",
        *table(COLUMNS, (_cells(name, row) for name, row in by_family)),
    ]
    return "\n".join(lines) + "\n"


def _cells(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    engines = {"engine.onnx": "ONNX Runtime", "model.ts.pt": "TorchScript"}
    return (
        *(row["family"], f"`{name}`", f"{row['parameters']:,}", row["fp32"]),
        *(engines.get(row["engine"], row["engine"]), row["sizes"], row["mutation"]),
        *(cell(row["fp16"], 120), f"{row['seconds']:.0f}", cell(row["reason"], 300)),
    )
