"""docs/results/tensorrt.md from benchmarks/results/tensorrt-rtx.json."""

from collections.abc import Mapping
from typing import Any

from rows import DOCS, Store, cell, table, versions

from trt_models.examine import BUILDS, PRECISIONS

STORE = Store(
    DOCS.parent / "benchmarks/results/tensorrt-rtx.json",
    under="models",
    keys=("group", "name"),
    libraries=("tensorrt-rtx-cu13-libs", "torch", "transformers", "onnx"),
)
PAGE = DOCS / "results" / "tensorrt.md"
GROUPS = {"vision": "[vision](vision.md)", "zoo": "[the zoo](zoo.md)"}
HEAD = """\
# TensorRT-RTX

`make trt-models` has TensorRT-RTX build an engine of the network that `--target tensorrt-rtx` makes
of each model that is verified in the zoo or in vision: tiny, with random weights. A build needs no
GPU. None of these engines has run: this says what the library takes, not what it computes. Models
that were not asked yet wait for `make trt-models MISSING=1`.
`benchmarks/results/tensorrt-rtx.json` has the rows.
"""


def render(found: Mapping[str, Any], verified: Mapping[str, int]) -> str:
    """The page.

    Args:
        verified: how many models each group has that were verified.
    """
    lines = [HEAD, versions(found), ""]
    models = found["models"]
    heads = ("models of", "verified", "asked", *(f"built in {name}" for name in PRECISIONS))
    counts = []
    for group, rows in models.items():
        built = [
            sum(row["answers"].get(precision) == BUILDS for row in rows.values())
            for precision in PRECISIONS
        ]
        counts.append((GROUPS[group], verified[group], len(rows), *built))
    lines += [*table(heads, counts), "", "## What does not build", ""]
    failed = [
        (f"`{name}`", precision, cell(said, 300))
        for rows in models.values()
        for name, row in rows.items()
        for precision, said in row["answers"].items()
        if said != BUILDS
    ]
    lines += [*table(("model", "precision", "reason"), _merged(failed)), ""]
    for group, rows in models.items():
        names = [n for n, row in rows.items() if set(row["answers"].values()) == {BUILDS}]
        lines += [f"## What builds in both: {group}", "", f"{', '.join(names)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _merged(failed: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Precisions of a model that fail for one reason in one row."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, precision, said in failed:
        found.setdefault((name, said), []).append(precision)
    return [(name, ", ".join(precisions), said) for (name, said), precisions in found.items()]
