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

Made by `make vision`: models of torchvision, timm, open_clip and Lightning, tiny or at a small
image size, with random weights, exported through a factory (`campaigns/vision/models.py`). \
enginecast
does not depend on these packages; where one is missing, its rows stay as they are.

* **fp32**: *verified* only where a second comparison agreed, too: the zoo's judge ran the published
  engine on fresh inputs, in other sizes where they vary, against eager, by a measure of its own. An
  engine that differs there is *silently wrong*.
* **sizes**: dimensions that vary, and the draws that the judge compared.
* **engine**: what runs: ONNX Runtime, or TorchScript.
* **mutation**: whether `enginecast verify` finds that the largest weight has lost a quarter of its
  rows.
* **fp16**: the verdict in true fp16 arithmetic (`verified-by-emulation`: not run on a GPU).
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
