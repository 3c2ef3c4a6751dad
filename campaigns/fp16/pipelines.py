"""One whole pipeline with loud channels, in fp16: plainly converted, and exported."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import keep_rows, one_line
from product import export
from tiny_pipelines import PIPELINES, arguments, save_pipeline
from torch import Tensor, nn

from enginecast.capture.sources.calls.recording import record
from enginecast.capture.sources.huggingface.component_options import ComponentOptions
from enginecast.compiler.prepare.open_model import open_model
from enginecast.compiler.prepare.program import prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.pipelines.check import relative_error
from enginecast.pipelines.folder import open_pipeline
from enginecast.pipelines.generate import Made, Wish, generate
from fp16.examine import CHANNEL, LOUD, enlarge, plant

NAMES = ("sd15", "sdxl", "flux", "qwen-image", "z-image", "wan")
SIDE = 40
"""No multiple of a pipeline's step, so that it is exported in one size: which takes a third of the
time, and sizes are not asked about here."""
STEPS = 3
RATIO = 16.0
"""Between loud channels and others.  Each layer that reads both hides the others, and tiny widths
do so more than those of trained models: with more, no picture depends on its prompt or noise."""
Errors = tuple[float | None, float | None]
"""Of the final latents and the pictures, relative to eager in fp32; None: not finite."""


@dataclass
class PipelineRow:
    """What became of one pipeline."""

    name: str
    kind: str = ""
    planted: int = 0
    """Layers that write a loud channel."""
    moved: Errors = (None, None)
    """What eager gives for another prompt and noise: how much there is to lose."""
    plain: Errors = (None, None)
    """What eager gives in fp16."""
    outcome: str = "not built"
    parts: dict[str, str] = field(default_factory=dict)
    """By component: its verdict, or why it has none."""
    found: Errors = (None, None)
    """What the pipeline of engines gives."""
    seconds: float = 0.0
    reason: str = ""
    group: str = "pipelines"


def examine_pipeline(name: str, folder: Path) -> PipelineRow:
    """Plant, convert and export one pipeline."""
    sizes = {**PIPELINES[name].sizes}
    if "frames" not in sizes:
        sizes |= {"height": SIDE, "width": SIDE}
    given: dict[str, Any] = {**sizes, "steps": STEPS}
    wish = Wish(more=arguments(name), **given)
    source = save_pipeline(name, folder / "pipeline")
    row = PipelineRow(name, PIPELINES[name].kind, plant_all(source, wish), outcome="crashed")
    eager = generate(open_pipeline(source).load(), wish)
    other = replace(wish, prompts=wish.prompts[::-1], seed=1)
    row.moved = _errors(eager, generate(open_pipeline(source).load(), other))
    half = open_pipeline(source).load(dtype=torch.float16)
    row.plain = _errors(eager, generate(half, wish))
    keep_rows([row], folder)
    asked = [f"--{option}={value}" for option, value in given.items()]
    asked += [f"--set={argument}={value}" for argument, value in wish.more.items()]
    asked += ["--precision", "fp16"]
    code, reported = export(str(source), folder / "out", asked, command="diffusers export")
    row.outcome, row.reason = f"exit code {code}", one_line(reported.get("message", ""), 300)
    if check := reported.get("check"):
        row.outcome, row.reason = check["outcome"], one_line("; ".join(check["reasons"]), 300)
        row.parts = {name: _verdict(part) for name, part in reported["components"].items()}
        if check["pictures"]:
            row.found = check["steps"][-1]["error"], check["pictures"]["error"]
    return row


def plant_all(source: Path, wish: Wish) -> int:
    """Make channels loud in each component, by what the pipeline gives it; in the order in which it
    calls them, since each changes what the next ones are given.

    Returns:
        How many layers have one.
    """
    folder = open_pipeline(source)
    pipe = folder.load()
    for part in folder.models:
        enlarge(getattr(pipe, part))
    with record(pipe) as calls:
        generate(pipe, wish)
    planted = 0
    for called in calls:
        part, _, entry = called.partition(".")
        module = getattr(pipe, part)
        with record(pipe) as again:
            generate(pipe, wish)
        recorded = again[called]
        module.save_pretrained(source / part)
        component = ComponentOptions(entry=entry)
        fixed = [f"{name}:0={len(given)}" for name, given in recorded.example.items() if given.ndim]
        options = ModelOptions(component=component, dynamic=[*recorded.fixed(), *fixed])
        opened = open_model(str(source / part), options, recorded)
        planted += plant(module, prepare(opened, options, Steps()), RATIO)
        if part == "vae":
            hush(module, partial(generate, pipe, wish))
        module.save_pretrained(source / part)
    return planted


def hush(vae: nn.Module, run: Callable[[], object]) -> None:
    """Make convolutions that read a loud channel itself, and no norm of it, weigh it less, as
    trained ones do: else their results are the same for all pictures."""
    loud = dict[nn.Conv2d | nn.Conv3d, bool]()

    def listen(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Conv2d | nn.Conv3d)
        loud[layer] = float(given[0].abs().max()) > LOUD / 2

    layers = [layer for layer in vae.modules() if isinstance(layer, nn.Conv2d | nn.Conv3d)]
    handles = [layer.register_forward_pre_hook(listen) for layer in layers]
    run()
    for handle in handles:
        handle.remove()
    for layer in (layer for layer in layers if loud.get(layer)):
        layer.weight.data.mul_(RATIO)[:, CHANNEL] /= RATIO**2


def _verdict(part: dict[str, Any]) -> str:
    outcomes = [each["outcome"] for each in part["engines"].values()]
    return ", ".join(outcomes) or f"{part['outcome']}: {one_line(part['reason'], 300)}"


def _errors(eager: Made, other: Made) -> Errors:
    latents = relative_error(eager.latents[-1], other.latents[-1])
    pictures = relative_error(eager.pictures, other.pictures)
    return _finite(latents), _finite(pictures)


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
