"""`enginecast inspect MODEL`: the plan of an export, without building: inputs, dtypes, sites,
costs.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from rich.console import Console
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from enginecast.capture.inputs.specs import DimSpec
from enginecast.cli.inspect.dtypes import INDEX, Dtypes, dtypes_of, print_census
from enginecast.cli.inspect.flow_page import flow_of, print_flow
from enginecast.cli.inspect.precision import Advice, advise, emulated, print_advice
from enginecast.cli.inspect.tensorrt import NetworkCheck, check_network
from enginecast.cli.terminal.output import say
from enginecast.compiler.attempts import FIRST, Tried
from enginecast.compiler.fusion_contract import expect_fusions
from enginecast.compiler.manifest import dtype_name
from enginecast.compiler.prepare import Prepared
from enginecast.compiler.request import EngineConfig
from enginecast.exporters.registry import target_of
from enginecast.passes.ir.edit import structural_copy, weight_specs, weight_tensor
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan, plan_of
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.quantize.plan.planning import form_in_words
from enginecast.passes.registry import build
from enginecast.verification.emulate.data import Emulation
from enginecast.verification.report.layout import print_table
from enginecast.verification.report.tables import print_emulation


@dataclass(frozen=True)
class Stored:
    """Weights of one dtype, and the first of their names."""

    dtype: str
    tensors: int
    elements: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class PassPlan:
    """What a pass would do."""

    spec: str
    rewritten: int
    left_alone: tuple[str, ...]
    """"module file:line: reason", each."""


@dataclass(frozen=True)
class Inspection:
    """The plan of an export."""

    model: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    census: tuple[Stored, ...]
    dtypes: Dtypes
    attempts: tuple[str, ...]
    """How the model was captured, and what was tried before."""
    control_flow: tuple[dict[str, Any], ...]
    """What the model's Python code decides, one finding a line."""
    advice: Advice
    expected: dict[str, int]
    """Fusable sites of the captured program by kind."""
    passes: tuple[PassPlan, ...]
    precision: str
    device: str
    runs_here: bool
    nodes: tuple[int, int]
    """Nodes of the program as captured, and after the passes."""
    emulation: Emulation | None
    """What low precision would do, module by module; None for fp32."""
    quantization: QuantizationPlan | None = None
    """What would be quantized, layer by layer."""
    tensorrt: NetworkCheck | None = None
    """What its parser would take, where that is the target."""

    def to_json(self) -> dict[str, Any]:
        plan, network = self.quantization, self.tensorrt
        fields = asdict(replace(self, tensorrt=None))
        del fields["attempts"]  # for people
        return {
            **fields,
            "quantization": None if plan is None else msgspec.to_builtins(plan),
            "tensorrt": None if network is None else network.to_json(),
        }


def inspect_model(prepared: Prepared, config: EngineConfig) -> Inspection:
    """Run the passes of a plan on a copy of the captured program, and measure what they do."""
    captured = prepared.captured
    program = structural_copy(captured.program)
    runs = run_pipeline(build(config.pipeline), program, prepared.context)
    return Inspection(
        model=prepared.source.name,
        inputs=tuple(
            f"{spec.name}: {dtype_name(spec.dtype)} [{', '.join(map(_dim, spec.dims))}]"
            for spec in captured.inputs
        ),
        outputs=tuple(
            f"{spec.name}: [{', '.join(map(str, spec.dims))}]" for spec in captured.outputs
        ),
        census=census(captured.program),
        dtypes=dtypes_of(captured.program, prepared.source.model_class),
        attempts=(str(Tried(FIRST, "taken")), *(f"    {rung}" for rung in captured.rungs)),
        control_flow=tuple(flow_of(prepared)),
        advice=advise(prepared, target_of(config.target).arithmetic),
        expected={kind: len(sites) for kind, sites in expect_fusions(captured.program).items()},
        passes=tuple(
            PassPlan(
                run.pass_.name,
                run.rewritten,
                tuple(f"{s.module} {s.source}: {s.reason}" for s in run.sites if s.reason),
            )
            for run in runs
        ),
        precision=config.asked_precision,
        device=config.device,
        runs_here=config.runs_here,
        nodes=(_calls(captured.program), _calls(program)),
        emulation=emulated(prepared, config, program),
        quantization=plan_of(program),
        tensorrt=check_network(prepared, config, program),
    )


def census(program: ExportedProgram) -> tuple[Stored, ...]:
    """The program's parameters and buffers by the dtype that they are stored in, largest first."""
    tensors: dict[str, list[tuple[str, int]]] = {}
    for spec in weight_specs(program).values():
        if spec.kind is InputKind.CONSTANT_TENSOR:
            continue
        tensor = weight_tensor(program, spec)
        found = tensors.setdefault(dtype_text(tensor.dtype), [])
        found.append((str(spec.target), tensor.numel()))
    stored = [
        Stored(dtype, len(found), sum(n for _, n in found), tuple(name for name, _ in found[:3]))
        for dtype, found in tensors.items()
    ]
    return tuple(sorted(stored, key=lambda s: -s.elements))


def print_inspection(found: Inspection, console: Console) -> None:
    """Show a plan on a terminal."""
    before, after = found.nodes
    say(console, f"{found.model}: {before} nodes captured, {after} after the passes")
    for line in found.inputs:
        say(console, f"  input {line}")
    for line in found.outputs:
        say(console, f"  output {line}")
    console.print()
    stored = [
        (row.dtype, str(row.tensors), f"{row.elements:,}", "\n".join(row.examples))
        for row in found.census
    ]
    print_table(console, ("stored as", "tensors", "elements", "such as"), stored)
    console.print()
    plans = [(plan.spec, str(plan.rewritten), _reasons(plan)) for plan in found.passes]
    print_table(console, ("pass", "would rewrite", "would leave alone"), plans)
    console.print()
    print_census(found.dtypes, console)
    console.print()
    print_attempts(found.attempts, console)
    print_flow(found.control_flow, console)
    console.print()
    print_advice(found.advice, console)
    console.print()
    expected = ", ".join(f"{count} {kind}" for kind, count in found.expected.items() if count)
    say(console, f"sites to fuse: {expected or 'none'}")
    where = "this machine runs it" if found.runs_here else "no provider of this machine runs it"
    say(console, f"{found.precision} for {found.device}: {where}")
    if found.quantization is not None:
        print_plan(found.quantization, console)
    if found.emulation is not None:
        console.print()
        print_emulation(found.emulation, console)
    if found.tensorrt is not None:
        console.print()
        found.tensorrt.show(console)


def print_attempts(lines: Sequence[str], console: Console) -> None:
    """Show how a model was captured, or why not."""
    for line in lines:
        say(console, line)
    console.print()


def _reasons(plan: PassPlan) -> str:
    found = Counter(line.split(": ", 1)[-1] for line in plan.left_alone)
    return "\n".join(f"{count}: {reason}" for reason, count in found.items())


def _dim(dim: DimSpec) -> str:
    return str(dim.maximum) if dim.name is None else f"{dim.name} {dim.shown}"


def _calls(program: ExportedProgram) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)


_NUMBER = re.compile(r"\d[\d.e+-]*")


def print_plan(plan: QuantizationPlan, console: Console) -> None:
    """What becomes of each layer, and of the whole."""
    error = "not measured" if plan.predicted_error is None else f"{plan.predicted_error:.3g}"
    head = f"{plan.format} plan for {plan.arch}: predicted error {error}"
    say(console, f"{head}, allowed {plan.max_error:.3g}")
    columns = ("layers", "n", "weight", "choice", "error", "outputs", "gain", "reason")
    print_table(console, columns, map(_layer_row, grouped(plan.layers)), whole=4)
    for note in plan.notes:
        say(console, note)


def _layer_row(group: Sequence[LayerPlan]) -> Sequence[str]:
    first = max(group, key=lambda layer: layer.error or 0.0)
    keeps = first.choice == "keep"
    return (
        INDEX.sub("*", first.module) if len(group) > 1 else first.module or "<root>",
        str(len(group)),
        " x ".join(map(str, first.shape)),
        "keep" if keeps else form_in_words(first),
        _number(max, (layer.error for layer in group)),
        _number(max, (layer.end_to_end for layer in group)),
        "" if keeps else _number(min, (layer.gain for layer in group)),
        first.reason,
    )


def grouped(layers: Iterable[LayerPlan]) -> list[Sequence[LayerPlan]]:
    """Layers that differ in the numbers of their modules, errors and gains alone, in order."""
    found: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        key = (
            INDEX.sub("*", layer.module),
            layer.shape,
            layer.choice,
            form_in_words(layer),
            layer.block,
            _NUMBER.sub("#", layer.reason),
        )
        found.setdefault(key, []).append(layer)
    return list(found.values())


def _number(choose: Any, values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{choose(known):.2g}" if known else ""
