"""One model with loud channels, in fp16: plainly converted, and exported."""

from collections.abc import Mapping, Sequence
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
from torch.fx import Node
from zoo import examine as zoo

from enginecast.capture.outputs.flatten import ALL, run_named
from enginecast.compiler.prepare.open_model import open_model
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.passes.analyses.scale_free import Layer, find_regions, layer_of
from enginecast.passes.analyses.value_bounds import magnitudes
from enginecast.passes.ir.edit import (
    aten,
    is_float,
    shape_of,
    structural_copy,
    weight_expressions,
    weight_specs,
    weight_tensor,
)
from enginecast.passes.ir.interpret import interpret_cases
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.registry import build
from enginecast.passes.rescale_streams import Fitted, fitted

LOUD = 2e5
"""Of the channel that is planted: T5's stream reaches 1.4e5, VAEs 3e5, feed-forwards 7e5."""
RATIO = 2000.0
"""Between the planted channel and the others, as in a trained model: were it more, their share of a
norm's result would be too small for fp16."""
STEADY = 0.2
"""Between the least and the largest value of a channel that a loud one may be made of: one that is
near zero for some input is not loud there, and lost in its row."""
WEIGHT = 3e4
"""The largest one."""
CHANNEL = 1
COMPONENTS = tuple(tiny_components.CONFIGS)
SUMS = (aten.add.Tensor, aten.mul.Tensor)
LINEAR = aten.linear.default
PLANTED = (
    aten.embedding.default,
    LINEAR,
    aten.conv2d.default,
    aten.conv3d.default,
)
MODELS = {one.name: one for one in FAMILIES}
OTHERS = ("swin", "convnext", "mistral")
"""Types of the zoo."""


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
    wide: int = 0
    """Values that stay in fp32 because fp16 does not hold them at any scale that is read."""
    casts: int = 0
    """Of the engine: where it leaves fp16."""
    seconds: float = 0.0
    reason: str = ""
    group: str = "models"


def examine(name: str, folder: Path) -> Row:
    """Plant, convert and export one model."""
    row = Row(name)
    quiet, loud = folder / "quiet", folder / "loud"
    if name in MODELS:
        quiet = MODELS[name].make(quiet)
    elif name in OTHERS:
        zoo.first_that_runs(zoo.Row(name), folder)
        quiet = (folder / "model").resolve()
    else:
        tiny_components.save(name, quiet)
    options = ModelOptions()
    kind: Any = open_model(str(quiet), options).model_class
    row.kind = kind.__name__
    module: Any = kind.from_pretrained(quiet).eval()
    enlarge(module)
    module.save_pretrained(quiet)
    prepared = prepare(open_model(str(quiet), options), options, Steps())
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
    row.largest = max(found.largest for found in magnitudes(program, cases, heavy).values())
    done = rescaled(again)
    powers = [f"2^-{one.power}" for one in done if one.power is not None]
    row.wide = len(done) - len(powers)
    row.plain = plainly(again.source.eager(torch.float32), cases[0])
    row.regions = f"{len(powers)}: {', '.join(sorted(set(powers)))}" if powers else "0"
    code, reported = export(str(loud), folder / "out", ["--precision", "fp16"])
    row.outcome = reported.get("verdict", {}).get("outcome", "refused") if reported else "refused"
    if code:
        row.reason = one_line("; ".join(reasons(reported)), 400)
    else:
        graph = onnx.load(folder / "out" / "engine.onnx", load_external_data=False).graph
        row.casts = sum(node.op_type == "Cast" and node.attribute[0].i == 1 for node in graph.node)
    return row


def enlarge(module: nn.Module) -> None:
    """Give layers weights as large as trained ones have, so that values are not all near zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d):
            weight = layer.weight.data
            spread = weight[0].numel() ** -0.5 / max(float(weight.std()), 1e-6)
            weight.mul_(max(1.0, spread))


def plant(module: nn.Module, prepared: Prepared, ratio: float = RATIO) -> int:
    """Make one channel of what feeds each norm loud, whatever the input: by an embedding, a bias,
    or a weight that reads a channel which is steady; where none is, a quarter of the channels.

    Args:
        ratio: between that channel and the others.

    Returns:
        How many layers have one.
    """
    program, state = prepared.captured.program, module.state_dict()
    specs, loud = weight_specs(program), dict[Node, Layer]()
    weights = weight_expressions(program)
    for region in find_regions(program, weights):
        for node, scaling in region.layers.items() if region.norms else ():
            # An embedding may be multiplied by a constant before it is read.
            writer = node if node.target in PLANTED else scaling.data
            layer = layer_of(writer, weights) if writer is not None else None
            if writer is None or layer is None or writer.target not in PLANTED:
                continue
            fits = shape_of(layer.times[0])[0] > CHANNEL
            known = any(layer.times == one.times for one in loud.values())  # of an earlier call
            if fits and specs.keys() >= {one.name for one in layer.times}:
                loud |= {} if known else {writer: layer}
                break

    def copies(weight: Node) -> tuple[Tensor, Tensor]:
        spec = specs[weight.name]
        name = next(one for one in state if one.endswith(str(spec.target)))
        return state[name], weight_tensor(program, spec)

    cases = [case.inputs for case in prepared.cases]
    for node, layer in sorted(loud.items()):  # each changes the input of the next
        rows = {one: list[Tensor]() for one in (node, layer.data) if one is not None}

        def keep(
            _: int, seen: Node, tensor: Tensor, rows: Mapping[Node, list[Tensor]] = rows
        ) -> None:
            if seen in rows:
                flat = tensor.flatten(0, -2)
                rows[seen].append(flat[flat.isfinite().all(-1)])

        interpret_cases(program, cases, watch=keep)
        largest = max(float(tensor.abs().max()) for tensor in rows[node] if tensor.numel())
        for weight in copies(layer.times[0]):
            weight *= LOUD / ratio / largest
            if node.target is aten.embedding.default:
                weight[:, CHANNEL] = LOUD
            elif not layer.plus:
                read = rows[layer.data] if layer.data and node.target is LINEAR else []
                channel, size = steady(read)
                if channel is None:  # several are loud, as far as fp16 holds the weights
                    several = weight[: max(1, len(weight) // 4)]
                    several *= min(ratio, WEIGHT / float(weight.abs().max()))
                else:
                    weight[CHANNEL] = 0.0
                    weight[CHANNEL, channel] = min(WEIGHT, LOUD / size)
        for bias in copies(layer.plus[0]) if layer.plus else ():
            bias[CHANNEL] = LOUD
    return len(loud)


def steady(rows: Sequence[Tensor]) -> tuple[int | None, float]:
    """A channel that is about as large for every input, if there is one, and its largest value."""
    if not rows:
        return None, 0.0
    sizes = torch.cat(list(rows)).abs()
    channel = int((sizes.amin(dim=0) / sizes.amax(dim=0)).argmax())
    least, most = float(sizes[:, channel].min()), float(sizes[:, channel].max())
    return (channel if least > STEADY * most else None), most


def rescaled(prepared: Prepared) -> tuple[Fitted, ...]:
    """What rescale-streams does to the program."""
    program = structural_copy(prepared.captured.program)
    run_pipeline(build("rescale-streams"), program, prepared.context)
    return fitted(program)


def plainly(module: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    """What the model gives with all its weights and inputs in fp16."""
    half = {n: t.half() if t.is_floating_point() else t for n, t in inputs.items()}
    try:
        with torch.no_grad():
            found = run_named(module.half(), half, ALL).values()
    except Exception as error:  # of the model
        return one_line(str(error), 80)
    lost = sum(int((~tensor.isfinite()).sum()) for tensor in found)
    return f"{lost} values not finite" if lost else "finite"
