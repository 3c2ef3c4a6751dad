"""The plan of an export: inputs, dtypes, sites, costs."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from enginecast.capture.inputs.specs import DimSpec
from enginecast.compiler.engines.fusion_contract import expect_fusions
from enginecast.compiler.engines.lower_and_run import dtype_name
from enginecast.compiler.export_attempts import FIRST, Tried
from enginecast.compiler.inspection.dtypes import Dtypes, dtypes_of
from enginecast.compiler.inspection.flow import flow_of
from enginecast.compiler.inspection.network import NetworkCheck, check_network
from enginecast.compiler.inspection.precision import Advice, advise
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.request import EngineConfig
from enginecast.exporters.registry import target_of
from enginecast.passes.ir.edit import structural_copy, weight_specs, weight_tensor
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.quantization_plan import QuantizationPlan, plan_of
from enginecast.passes.ir.text import DTYPES, dtype_text
from enginecast.passes.precision.census import cast_fates
from enginecast.passes.registry import build
from enginecast.passes.rescale_streams import Fitted, fitted
from enginecast.passes.unify_dtype import UnifyDtype
from enginecast.verification.eager.outputs import mask_of
from enginecast.verification.emulate.data import Emulation
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import emulate


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
    regions: tuple[Fitted, ...] = ()
    """What would be scaled, or stay in fp32, so that fp16 holds it."""
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
    passes = build(config.pipeline)
    at = next((n for n, each in enumerate(passes) if isinstance(each, UnifyDtype)), 0)
    runs = run_pipeline(passes[:at], program, prepared.context)
    policy = passes[at] if passes else None
    unify = policy if isinstance(policy, UnifyDtype) else UnifyDtype()
    fates = cast_fates(program, unify.kept(program), dtype_text(DTYPES[unify.to]))
    runs += run_pipeline(passes[at:], program, prepared.context)
    arithmetic, emulation = target_of(config.target).arithmetic, None
    if config.precision != "fp32":
        cases = prepared.observed
        _, emulation = emulate(
            program,
            {case.name: case.inputs for case in cases},
            get_profile(arithmetic),
            masks=[mask_of(case, prepared.mask_input) for case in cases],
        )
    skips = target_of(config.target).has_skip_norm
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
        dtypes=dtypes_of(captured.program, prepared.source.model_class, fates, captured.autocast),
        attempts=(str(Tried(FIRST, "taken")), *(f"    {rung}" for rung in captured.rungs)),
        control_flow=tuple(flow_of(prepared)),
        advice=advise(prepared, arithmetic),
        expected={
            kind: len(sites)
            for kind, sites in expect_fusions(captured.program, skip_norms=skips).items()
        },
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
        emulation=emulation,
        regions=fitted(program),
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


def _dim(dim: DimSpec) -> str:
    return str(dim.maximum) if dim.name is None else f"{dim.name} {dim.shown}"


def _calls(program: ExportedProgram) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)
