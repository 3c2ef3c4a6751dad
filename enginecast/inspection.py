"""`enginecast inspect MODEL`: the plan of an export, without building: inputs, dtypes, sites,
costs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from enginecast.advice import Advice, advise
from enginecast.advice_words import print_advice
from enginecast.census_page import Dtypes, dtypes_of, print_census
from enginecast.describe import dtype_name
from enginecast.exporters.fusion_contract import expect_fusions
from enginecast.flow_page import flow_of, print_flow
from enginecast.forecast import forecast, print_forecast
from enginecast.passes.base import Site
from enginecast.passes.graph_edit import structural_copy, weight_specs, weight_tensor
from enginecast.passes.ir_text import dtype_text
from enginecast.passes.pipeline import build, run_pipeline
from enginecast.passes.quantization_plan import QuantizationPlan, plan_of
from enginecast.plan import Plan
from enginecast.prepare import Prepared
from enginecast.quantization_page import print_plan
from enginecast.readiness import Readiness, readiness_of
from enginecast.terminal import say, table
from enginecast.verify.emulation_data import Emulation


@dataclass(frozen=True)
class Stored:
    """Weights of one dtype: how many tensors, how many elements, and of which modules when they are
    few.
    """

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
    """What would be quantised, layer by layer."""
    tensorrt: Readiness | None = None
    """What its parser would take, where that is the target."""

    def to_json(self) -> dict[str, Any]:
        plan, network = self.quantization, self.tensorrt
        return {
            **asdict(replace(self, tensorrt=None)),
            "quantization": None if plan is None else msgspec.to_builtins(plan),
            "tensorrt": None if network is None else network.to_json(),
        }


def inspect_model(prepared: Prepared, plan: Plan) -> Inspection:
    """Run the passes of a plan on a copy of the captured program and tell what they would do.

    Raises:
        PassError, SpecError: the pipeline does not fit.
    """
    captured = prepared.captured
    program = structural_copy(captured.program)
    runs = run_pipeline(build(plan.pipeline), program, prepared.context)
    return Inspection(
        model=prepared.source.name,
        inputs=tuple(
            f"{spec.name}: {dtype_name(spec.dtype)}"
            f" [{', '.join(_dim(d.name, d.minimum, d.maximum) for d in spec.dims)}]"
            for spec in captured.inputs
        ),
        outputs=tuple(
            f"{spec.name}: [{', '.join(map(str, spec.dims))}]" for spec in captured.outputs
        ),
        census=census(captured.program),
        dtypes=dtypes_of(captured.program, prepared.source.model_class),
        control_flow=tuple(flow_of(prepared)),
        advice=advise(prepared),
        expected={
            kind: len(sites) for kind, sites in expect_fusions(captured.program).sites.items()
        },
        passes=tuple(
            PassPlan(run.pass_.name, run.rewritten, _left_alone(run.sites)) for run in runs
        ),
        precision=plan.name,
        device=plan.device,
        runs_here=plan.runs_here,
        nodes=(_calls(captured.program), _calls(program)),
        emulation=forecast(prepared, plan, program),
        quantization=plan_of(program),
        tensorrt=readiness_of(prepared, plan, program),
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
    for content in (_census_table(found.census), _passes_table(found.passes)):
        console.print()
        console.print(content)
    console.print()
    print_census(found.dtypes, console)
    console.print()
    print_flow(found.control_flow, console)
    console.print()
    advice = found.advice
    print_advice(advice.options, advice.recommended, len(advice.cases), console)
    console.print()
    expected = ", ".join(f"{count} {kind}" for kind, count in found.expected.items() if count)
    say(console, f"sites to fuse: {expected or 'none'}")
    where = "this machine runs it" if found.runs_here else "no provider of this machine runs it"
    say(console, f"{found.precision} for {found.device}: {where}")
    if found.quantization is not None:
        print_plan(found.quantization, console)
    print_forecast(found.emulation, console)
    if found.tensorrt is not None:
        console.print()
        found.tensorrt.show(console)


def _census_table(rows: Sequence[Stored]) -> Table:
    shown = table("stored as", "tensors", "elements", "such as")
    for row in rows:
        shown.add_row(row.dtype, str(row.tensors), f"{row.elements:,}", "\n".join(row.examples))
    return shown


def _passes_table(rows: Sequence[PassPlan]) -> Table:
    shown = table("pass", "would rewrite", "would leave alone")
    for row in rows:
        reasons = Counter(line.split(": ", 1)[-1] for line in row.left_alone)
        text = "\n".join(f"{count}: {reason}" for reason, count in reasons.items())
        shown.add_row(row.spec, str(row.rewritten), text)
    return shown


def _left_alone(sites: Sequence[Site]) -> tuple[str, ...]:
    return tuple(f"{s.module} {s.source}: {s.reason}" for s in sites if s.reason)


def _dim(name: str | None, minimum: int, maximum: int) -> str:
    return str(maximum) if name is None else f"{name} {minimum}..{maximum}"


def _calls(program: ExportedProgram) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)
