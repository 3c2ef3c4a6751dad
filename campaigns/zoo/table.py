"""The zoo's results: a JSON file, and the page that is made from it."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from zoo.examine import RAN_IN_EAGER, Row
from zoo.tiny import PACKAGES, package_of

RESULTS = Path(__file__).with_name("results.json")
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")


def merge(rows: Iterable[Row], file: Path) -> None:
    """Put rows into the results, in place of older ones of the same types."""
    found = read(file)
    for row in rows:
        found["models"][row.model_type] = {
            k: v for k, v in asdict(row).items() if k != "model_type"
        }
    found["versions"] = {name: version(name) for name in LIBRARIES}
    found["models"] = dict(sorted(found["models"].items()))
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> dict[str, Any]:
    """The results there are."""
    if not file.exists():
        return {"versions": {}, "models": {}}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def counts(models: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    """How many models ended how."""
    return Counter(str(model["outcome"]) for model in models.values())


def share_verified(models: Mapping[str, Mapping[str, Any]]) -> float:
    """Verified, of those that run in eager."""
    ended = counts(models)
    ran = sum(ended[name] for name in RAN_IN_EAGER)
    return ended["verified"] / ran if ran else 0.0


def write_table(results: Path, page: Path) -> None:
    """Write the page."""
    found = read(results)
    models, ended = found["models"], counts(found["models"])
    ran = sum(ended[name] for name in RAN_IN_EAGER)
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        "# The zoo",
        "",
        "Made by `make zoo`: every base architecture of transformers, tiny, with random perturbed",
        "weights, exported in fp32 with the inputs that enginecast derives, or, where the config",
        "does not say it all, with given ones as the model's processor makes them (`--inputs`,",
        "campaigns/zoo/given.py). A bundle that was published is compared with eager again, on",
        "other shapes and by another measure; one that differs there is *silently wrong*.",
        "",
        "Some types need a package that enginecast does not: "
        + ", ".join(f"{name} ({len(types)})" for name, types in PACKAGES.items())
        + ".",
        "Their rows name it, and stay as they are where it is not installed. A class followed by a",
        "name, as `BarkModel.semantic`, is a model without a `forward` for tensors: that method or",
        "part of it is exported, through a factory (campaigns/zoo/entries.py).",
        "",
        f"{versions}.",
        "",
        f"{len(models)} of the {len(MODEL_MAPPING_NAMES)} model types have been examined; {ran} "
        f"run in eager with these inputs, of these {ended['verified']} "
        f"({share_verified(models):.1%}) are verified.",
        "",
        "| outcome | models |",
        "|---|---|",
        *(f"| {name} | {ended[name]} |" for name in RAN_IN_EAGER),
        *(f"| {name} | {ended[name]} |" for name in ("not run in eager", "not built")),
        "",
        "| model type | class | needs | parameters | outcome | seconds | reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in models.items():
        reason = short(row["reason"])
        lines.append(
            f"| {name} | {row['model_class']} | {package_of(name)} "
            f"| {row['parameters']:,} | {row['outcome']} "
            f"| {row['seconds']:.0f} | {reason} |"
        )
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def short(reason: str) -> str:
    """A reason that fits in a cell."""
    reason = reason.replace("torch.export refused the model", "torch.export")
    cut = reason if len(reason) <= 160 else f"{reason[:157]}..."
    return cut.replace("|", "\\|").replace("`", "'")
