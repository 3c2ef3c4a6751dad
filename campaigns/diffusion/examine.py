"""One tiny pipeline: exported, compared, and run again with the engines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import keep_rows, one_line
from product import export
from tiny_pipelines import PIPELINES, asked, image_options, save_pipeline

from enginecast.cli.app import main

STEPS = 3


@dataclass
class Row:
    """What became of one pipeline."""

    name: str
    kind: str = ""
    engines: int = 0
    eager: dict[str, str] = field(default_factory=dict)
    """Components that stay in PyTorch, and why."""
    outcome: str = "not built"
    worst: float | None = None
    """The largest relative error of the latents after a step, or of the pictures."""
    allowed: float | None = None
    """The limit there."""
    psnr: float | None = None
    """Of the pictures, in dB; None: they are equal."""
    sizes: list[list[int]] = field(default_factory=list)
    """Heights and widths that it was recorded at."""
    runs: bool = False
    """Whether `diffusers run` makes a picture or a video."""
    seconds: float = 0.0
    reason: str = ""


def examine(name: str, folder: Path) -> Row:
    """Export one pipeline, and run what was made."""
    source, output = save_pipeline(name, folder / "pipeline"), folder / "engines"
    row = Row(name, PIPELINES[name].kind, outcome="crashed")
    keep_rows([row], folder)
    images = image_options(name, folder)
    options = ["--steps", str(STEPS), *asked(name), *images]
    code, found = export(str(source), output, options, command="diffusers export")
    row.reason = one_line(found.get("message", ""), 300)
    row.outcome = f"exit code {code}"
    if check := found.get("check"):
        row.outcome, row.reason = check["outcome"], one_line("; ".join(check["reasons"]), 300)
        for part, made in found["components"].items():
            row.engines += len(made["engines"])
            if not made["engines"]:
                row.eager[part] = one_line(made["reason"], 200)
        stages = [*check["steps"], *filter(None, [check["pictures"]])]
        if stages:  # there are none where the engines refuse a call
            worst = max(stages, key=lambda stage: (stage["error"] or 0.0) / stage["limit"])
            row.worst, row.allowed, row.psnr = worst["error"], worst["limit"], check["psnr"]
        row.sizes = [list(size) for size in found["sizes"]]
        row.runs = not code and _runs(output, images, "frames" in PIPELINES[name].sizes)
    return row


def _runs(engines: Path, images: Sequence[str], is_video: bool) -> bool:
    made = engines.with_name("made" if is_video else "made.png")
    words = ["--prompt", "a tower", "-o", str(made), "--steps", "4", *images]
    try:
        main(["diffusers", "run", str(engines), *words])
    except SystemExit as stop:
        return not stop.code and made.exists()
    return made.exists()
