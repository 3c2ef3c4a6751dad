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
        "`make zoo` exports every base architecture of transformers in fp32, tiny and with random",
        "weights. enginecast derives the inputs from the config; if that is not enough, we pass",
        "what the model's processor makes (`--inputs`). Each published bundle is compared with",
        "eager again, on other shapes and by another measure. If it differs there, it is *silently",
        "wrong*.",
        "",
        "Some types need another package: "
        + ", ".join(f"{name} ({len(types)})" for name, types in PACKAGES.items())
        + ".",
        "A class followed by a name, such as `BarkModel.semantic`, has no `forward` for tensors;",
        "we export that method or part.",
        "",
        versions(found),
        "",
        f"Of {len(MODEL_MAPPING_NAMES)} model types, {len(models)} were examined and {ran} run in "
        f"eager with these inputs; {ended['verified']} of those ({share_verified(models):.1%}) are "
        "verified.",
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
