"""One model with loud channels, in fp16: plainly converted, and exported."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import tiny_components
import torch
from family_models import FAMILIES
from harness import keep_rows, one_line
from product import export, reasons
from torch import Tensor, nn

from enginecast.capture.outputs.flatten import name_result
from enginecast.compiler.prepare.open_model import open_model
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.passes.analyses.scale_free import find_regions
from enginecast.passes.analyses.value_bounds import largest_values
from enginecast.passes.ir.base import Site
from enginecast.passes.ir.edit import (
    aten,
    is_float,
    structural_copy,
    weight_expressions,
    weight_specs,
)
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.registry import build

LOUD = 2e5
"""Of the channel that is planted: T5's stream reaches 1.4e5, VAEs 3e5, feed-forwards 7e5."""
CHANNEL = 1
COMPONENTS = tuple(tiny_components.CONFIGS)
SUMS = (aten.add.Tensor, aten.mul.Tensor)
PLANTED = (aten.linear.default, aten.conv2d.default, aten.conv3d.default)
MODELS = {one.name: one for one in FAMILIES}


@dataclass
class Row:
    """What became of one model."""

    name: str
    kind: str = ""
    planted: int = 0
    """Layers that write a loud channel."""
    largest: float = 0.0
    """Of all that layers and sums give, in fp32."""
    plain: str = ""
    """What eager gives after `.half()`."""
    outcome: str = "not built"
    regions: str = ""
    """Scaled, and their powers."""
    casts: int = 0
    """Of the engine: where it leaves fp16."""
    seconds: float = 0.0
    reason: str = ""


def examine(name: str, folder: Path) -> Row:
    """Plant, convert and export one model."""
    row = Row(name)
    quiet, loud = folder / "quiet", folder / "loud"
    if name in MODELS:
        quiet = MODELS[name].make(quiet)
    else:
        tiny_components.save(name, quiet)
    options = ModelOptions()
    prepared = prepare(open_model(str(quiet), options), options, Steps())
    kind: Any = prepared.source.model_class
    row.kind = kind.__name__
    module: Any = kind.from_pretrained(quiet).eval()
    row.planted = plant(module, prepared)
    module.save_pretrained(loud)
    for file in quiet.iterdir():
        if not (loud / file.name).exists():
            (loud / file.name).write_bytes(file.read_bytes())
    row.outcome = "crashed"
    keep_rows([row], folder)
    again = prepare(open_model(str(loud), options), options, Steps())
    program = again.captured.program
    cases = [case.inputs for case in again.cases]
    nodes = filter(is_float, program.graph.nodes)
    heavy = {n for n in nodes if has(n, Trait.HEAVY) or n.target in SUMS}
    row.largest = max(largest_values(program, cases, heavy).values())
    powers = [site.note.split()[2] for site in rescaled(again) if site.rewritten]
    row.plain = plainly(kind.from_pretrained(loud).eval(), cases[0])
    row.regions = f"{len(powers)}: {', '.join(sorted(set(powers)))}" if powers else "0"
    code, reported = export(str(loud), folder / "out", ["--precision", "fp16"])
    row.outcome = reported.get("verdict", {}).get("outcome", "refused") if reported else "refused"
    if code:
        row.reason = one_line("; ".join(reasons(reported)), 400)
    else:
        graph = onnx.load(folder / "out" / "engine.onnx", load_external_data=False).graph
        row.casts = sum(node.op_type == "Cast" and node.attribute[0].i == 1 for node in graph.node)
    return row


def plant(module: nn.Module, prepared: Prepared) -> int:
    """Make one channel of what feeds each norm loud, by a layer's bias or a row of its weight; how
    many layers have one.
    """
    program, state = prepared.captured.program, module.state_dict()
    specs, loud = weight_specs(program), {}
    for region in find_regions(program, weight_expressions(program)):
        for node, layer in region.layers.items() if region.norms else ():
            if node.target in PLANTED and layer.times[0].name in specs:
                loud[node] = next(str(specs[w.name].target) for w in (*layer.plus, *layer.times))
                break
    sizes = largest_values(program, [case.inputs for case in prepared.cases], set(loud))
    for node, name in loud.items():
        name = next(one for one in state if name.endswith(one))
        if state[name].dim() == 1:
            state[name][CHANNEL] = LOUD
        else:
            state[name][CHANNEL] *= LOUD / sizes[node]
    return len(loud)


def rescaled(prepared: Prepared) -> tuple[Site, ...]:
    """What rescale-streams does to the program."""
    program = structural_copy(prepared.captured.program)
    (run,) = run_pipeline(build("rescale-streams"), program, prepared.context)
    return run.sites


def plainly(module: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    """What the model gives with all its weights and inputs in fp16."""
    half = {n: t.half() if t.is_floating_point() else t for n, t in inputs.items()}
    try:
        with torch.no_grad():
            found = name_result(module.half()(**half), inputs=half).tensors.values()
    except Exception as error:  # of the model
        return one_line(str(error), 80)
    lost = sum(int((~tensor.isfinite()).sum()) for tensor in found)
    return f"{lost} values not finite" if lost else "finite"
