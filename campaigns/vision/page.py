"""docs/results/vision.md from campaigns/vision/results.json."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vision.examine import Row

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parent.parent.parent / "docs" / "results" / "vision.md"
LIBRARIES = ("torch", "torchvision", "timm", "open-clip-torch", "lightning", "onnx", "onnxruntime")
COLUMNS = (
    *("family", "model", "parameters", "fp32", "engine", "sizes", "mutation", "fp16", "seconds"),
    "reason",
)
HEAD = """\
# Vision

Made by `make vision`: models of torchvision, timm, open_clip and Lightning, tiny or at a small
image size, with random weights, exported through a factory (`campaigns/vision/models.py`).
enginecast does not depend on these packages; where one is missing, its rows stay as they are.

* **fp32**: *verified* only where a second comparison agreed, too: the zoo's judge ran the published
  engine on fresh inputs, in other sizes where they vary, against eager, by a measure of its own. An
  engine that differs there is *silently wrong*.
* **sizes**: dimensions that vary, and the draws that the judge compared.
* **engine**: what runs: ONNX Runtime, or TorchScript.
* **mutation**: whether `enginecast verify` finds that the largest weight has lost a quarter of its
  rows.
* **fp16**: the verdict in true fp16 arithmetic (`verified-by-emulation`: not run on a GPU).
"""


def read(file: Path = RESULTS) -> dict[str, Any]:
    """The results there are."""
    if not file.exists():
        return {"versions": {}, "models": {}}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def merge(rows: Iterable["Row"], file: Path = RESULTS) -> None:
    """Put rows into the results, in place of older ones of the same names."""
    found = read(file)
    for row in rows:
        found["models"][row.name] = {k: v for k, v in asdict(row).items() if k != "name"}
    for name in LIBRARIES:
        try:
            found["versions"][name] = version(name)
        except PackageNotFoundError:
            continue
    found["models"] = dict(sorted(found["models"].items()))
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def render(found: dict[str, Any]) -> str:
    """The page."""
    models = found["models"]
    ended = Counter(row["fp32"] for row in models.values())
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        HEAD,
        f"{versions}.\n",
        f"{len(models)} models: {', '.join(f'{count} {name}' for name, count in ended.items())}.\n",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for name, row in sorted(models.items(), key=lambda item: (item[1]["family"], item[0])):
        cells = [
            *(row["family"], f"`{name}`", f"{row['parameters']:,}", row["fp32"]),
            *(_engine(row["engine"]), row["sizes"], row["mutation"], _short(row["fp16"], 120)),
            *(f"{row['seconds']:.0f}", _short(row["reason"], 300)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _engine(file: str) -> str:
    return {"engine.onnx": "ONNX Runtime", "model.ts.pt": "TorchScript"}.get(file, file)


def _short(text: str, most: int) -> str:
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    return cut.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def main() -> None:
    PAGE.write_text(render(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
