"""The zoo's results: a JSON file, and the page that is made from it."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import DOCS, Store, cell, table, versions
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from zoo.examine import RAN_IN_EAGER
from zoo.tiny import PACKAGES, package_of

STORE = Store(
    Path(__file__).with_name("results.json"),
    under="models",
    keys=("model_type",),
    libraries=("torch", "transformers", "onnx", "onnxscript", "onnxruntime"),
)
read, merge = STORE.read, STORE.merge
PAGE = DOCS / "results" / "zoo.md"


def counts(models: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    """How many models ended how."""
    return Counter(str(model["outcome"]) for model in models.values())


def share_verified(models: Mapping[str, Mapping[str, Any]]) -> float:
    """Verified, of those that run in eager."""
    ended = counts(models)
    ran = sum(ended[name] for name in RAN_IN_EAGER)
    return ended["verified"] / ran if ran else 0.0


def page(found: Mapping[str, Any]) -> str:
    """The page's text."""
    models, ended = found["models"], counts(found["models"])
    ran = sum(ended[name] for name in RAN_IN_EAGER)
    lines = [
        "# The zoo",
        "",
        "Made by `make zoo`: every base architecture of transformers, tiny, with random perturbed",
        "weights, exported in fp32 with the inputs that enginecast derives, or, where the config",
        "does not say it all, with given ones as the model's processor makes them (`--inputs`,",
        "campaigns/zoo/given.py). A bundle that was published is compared with eager again, on "
        "other",
        "shapes and by another measure; one that differs there is *silently wrong*.",
        "",
        "Some types need a package that enginecast does not: "
        + ", ".join(f"{name} ({len(types)})" for name, types in PACKAGES.items())
        + ".",
        "Their rows name it, and stay as they are where it is not installed. A class followed by a",
        "name, as `BarkModel.semantic`, is a model without a `forward` for tensors: that method or",
        "part of it is exported, through a factory (campaigns/zoo/entries.py).",
        "",
        versions(found),
        "",
        f"{len(models)} of the {len(MODEL_MAPPING_NAMES)} model types have been examined; {ran} "
        f"run in eager with these inputs, of these {ended['verified']} "
        f"({share_verified(models):.1%}) are verified.",
        "",
        *table(
            ("outcome", "models"),
            ((name, ended[name]) for name in (*RAN_IN_EAGER, "not run in eager", "not built")),
        ),
        "",
        *table(
            ("model type", "class", "needs", "parameters", "outcome", "seconds", "reason"),
            (_cells(name, row) for name, row in models.items()),
        ),
    ]
    return "\n".join(lines) + "\n"


def _cells(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    reason = row["reason"].replace("torch.export refused the model", "torch.export")
    return (
        *(name, row["model_class"], package_of(name), f"{row['parameters']:,}"),
        *(row["outcome"], f"{row['seconds']:.0f}", cell(reason, 160, escape="|`")),
    )
