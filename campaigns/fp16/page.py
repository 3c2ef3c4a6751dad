"""docs/results/fp16.md from campaigns/fp16/results.json."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import DOCS, Store, cell, table, versions

STORE = Store(
    Path(__file__).with_name("results.json"),
    keys=("group", "name"),
    libraries=("torch", "transformers", "diffusers", "onnxruntime"),
)
PAGE = DOCS / "results" / "fp16.md"
COLUMNS = (
    *("model", "class", "loud layers", "largest", "plain fp16", "enginecast", "regions"),
    *("in fp32", "casts", "reason"),
)
HEAD = """\
# fp16 of loud models

`make fp16` takes tiny models of the real classes, with random weights, and plants what trained
ones have: the layer that first feeds each norm gives one channel 2e5, three times what fp16 holds
and 2000 times the others. Then it exports them with `--precision fp16`.

* **largest**: of all that layers and sums give, in fp32.
* **plain fp16**: what the model gives after `.half()`.
* **enginecast**: the verdict in true fp16 arithmetic; none of these engines has run on a GPU.
* **regions**: how many `rescale-streams` scaled, and by which powers
  ([how](../how-it-works/passes.md#values-that-fp16-does-not-hold)).
* **in fp32**: values that stay in fp32, with what reads them: fp16 does not hold them at the scale
  at which they are read.
* **casts**: nodes of the engine that leave fp16, those of the model's own norms among them.
"""

PIPELINES = """
## Whole pipelines

Tiny pipelines of the real classes with random weights, and loud channels in every component: one
channel reaches 2e5, the others a sixteenth. `enginecast diffusers export --precision fp16` on each,
and relative errors (L2, the worst of two prompts) of the final latents and of the pictures against
the same pipeline in eager fp32.

* **another prompt and noise**: how far eager in fp32 moves for these, to see an error beside.
* **plain fp16**: the pipeline loaded in float16.
* **enginecast**: the engines as they ran here. The CPU provider computes fp16 engines with casts;
  true fp16 arithmetic judges each component on the recorded calls of the run
  (`verified-by-emulation`).
"""
PIPELINE_COLUMNS = (
    *("pipeline", "class", "loud layers", "components", "another prompt and noise"),
    *("plain fp16", "enginecast", "whole", "reason"),
)


def render(found: Mapping[str, Any]) -> str:
    """The page."""
    models = found["models"]
    ended = Counter(row["outcome"] for row in models.values())
    lines = [
        HEAD,
        versions(found),
        "",
        f"{len(models)} models: {', '.join(f'{count} {name}' for name, count in ended.items())}.",
        "",
        *table(COLUMNS, (_cells(name, row) for name, row in models.items())),
        PIPELINES,
        *table(PIPELINE_COLUMNS, (_whole(*each) for each in found["pipelines"].items())),
    ]
    return "\n".join(lines) + "\n"


def _cells(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        *(f"`{name}`", row["kind"], row["planted"], f"{row['largest']:.2g}"),
        *(cell(row["plain"], 60), row["outcome"], row["regions"]),
        *(row["wide"], row["casts"]),
        cell(row["reason"], 300),
    )


def _whole(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    parts = "; ".join(f"{part}: {cell(said, 300)}" for part, said in row["parts"].items())
    return (
        *(f"`{name}`", row["kind"], row["planted"], parts, _pair(row["moved"])),
        *(_pair(row["plain"]), _pair(row["found"]), row["outcome"], cell(row["reason"], 300)),
    )


def _pair(errors: Sequence[float | None]) -> str:
    latents, pictures = ("not finite" if each is None else f"{each:.2g}" for each in errors)
    return f"latents {latents}, pictures {pictures}"
