"""Our own engines on one case: the program after the passes, compiled ahead of time by AOTInductor.

fp8 is planned by sizes alone, without errors on calibration inputs and without `smooth-outliers`,
which a scale for each row hardly needs.  Then times decide: a layer whose product was measured to
be slower in fp8 than in bf16 on this device, quantizing included, is kept in bf16.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from gpu_peers import OUTPUT, AbsentError, Bench, Made
from gpu_products import Product, Timed
from safetensors.torch import load_file
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.exporters.aotinductor.lower import PACKAGE_FILE, lower_to_aotinductor, lowering
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.weights.file import WEIGHTS_FILE
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan, plan_of
from enginecast.passes.presets import preset
from enginecast.passes.registry import build
from enginecast.runtime.device.cuda_graphs import AFTER, GraphCache, recorder
from enginecast.runtime.sessions.aotinductor import NAMES

Measured = Mapping[tuple[int, int], Timed]
"""Times of products by [n, k] of their weight, at the rows of one case."""


def ours_bf16(bench: Bench) -> Made:
    """The program of the bf16 preset."""
    program = structural_copy(bench.program())
    run_pipeline(build(preset("bf16", device=bench.device)), program, PassContext())
    return _compiled(program, bench, {})


def ours_fp8(bench: Bench, measured: Measured) -> Made:
    """The same with the plan's layers in fp8."""
    plan = plan_by_sizes(bench)
    if bench.arch != "cpu":  # which multiplies in fp8 for its numbers, and is never faster
        plan = with_measured(plan, measured)
    if all(layer.choice == "keep" for layer in plan.layers):
        raise AbsentError("no layer of this size is faster in fp8")
    program = structural_copy(bench.program())
    run_pipeline(build(_fp8_pipeline(bench)), program, PassContext(plan=plan))
    return _compiled(program, bench, {"plan": summary_of(plan)})


def plan_by_sizes(bench: Bench) -> QuantizationPlan:
    """Every layer that a native fp8 product takes, whatever its size is."""
    program = structural_copy(bench.program())
    passes = build(_fp8_pipeline(bench))[:-1]  # fp8-matmul would carry the plan out
    run_pipeline(passes, program, PassContext())
    plan = plan_of(program)
    assert plan is not None
    return plan


def _fp8_pipeline(bench: Bench) -> str:
    plan = f"plan-fp8{{arch={bench.arch} min_gain=0.0 measure=false}}"
    return f"{preset('bf16', device=bench.device)},{plan},fp8-matmul"


def planned_products(plan: QuantizationPlan, rows: int) -> Counter[Product]:
    """The products of the plan's linears, as merged by the passes, and how often each."""
    return Counter(
        Product(rows, layer.shape[1], layer.shape[0])
        for layer in plan.layers
        if layer.kind == "linear"
    )


def with_measured(plan: QuantizationPlan, measured: Measured) -> QuantizationPlan:
    """The plan with gains as measured; what is slower in fp8 is kept as it is."""
    layers = tuple(_decided(layer, measured) for layer in plan.layers)
    return msgspec.structs.replace(plan, layers=layers)


def _decided(layer: LayerPlan, measured: Measured) -> LayerPlan:
    timed = measured.get((layer.shape[0], layer.shape[1])) if len(layer.shape) == 2 else None
    gain = None if timed is None else timed.gain
    if layer.kind != "linear" or layer.choice == "keep" or gain is None:
        return layer
    layer = msgspec.structs.replace(layer, gain=round(gain, 3), gain_from="measured")
    if gain >= 1.0:
        return layer
    return msgspec.structs.replace(
        layer,
        choice="keep",
        activations=None,
        reason=f"slower in fp8: measured at {gain:.2f} of its speed in bf16",
    )


def summary_of(plan: QuantizationPlan) -> list[dict[str, Any]]:
    """One line for each shape and decision, with how many layers it is of."""
    counted = Counter(
        (layer.kind, layer.shape, layer.choice, layer.gain, layer.gain_from, layer.reason)
        for layer in plan.layers
    )
    names = ("kind", "shape", "choice", "gain", "gain_from", "reason")
    return [{**dict(zip(names, found, strict=True)), "layers": n} for found, n in counted.items()]


def _compiled(program: ExportedProgram, bench: Bench, details: Mapping[str, Any]) -> Made:
    """Compile, load, and run as `runtime.sessions.aotinductor` does, on inputs of the device."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_pipeline(build(lowering(bench.device)), program, PassContext())
        request = LoweringRequest(program, folder, [OUTPUT], device=bench.device)
        lowered = lower_to_aotinductor(request)
        size = sum((folder / name).stat().st_size for name in lowered.files)
        model = torch._inductor.aoti_load_package(
            str(folder / PACKAGE_FILE), run_single_threaded=bench.device == "cuda"
        )
        names = json.loads(model.get_metadata()[NAMES])
        weights = load_file(folder / WEIGHTS_FILE, device=bench.device)
    wanted = {name: weights[names["weights"][name]] for name in model.get_constant_fqns()}
    model.load_constants(wanted, check_full_update=True, user_managed=True)

    def plain(tensors: Sequence[Any]) -> list[Any]:
        found: list[Any] = model.loader.boxed_run(list(tensors))
        return found

    call: Callable[[Sequence[Any]], list[Any]] = plain
    if bench.device == "cuda":
        call = GraphCache(plain, recorder(torch))
    inputs = [bench.case.inputs[name] for name in names["inputs"]]

    def run(_kept: object = wanted) -> Tensor:  # the code reads the weights where they are
        with torch.no_grad():
            found: list[Tensor] = call(inputs)
        return found[0]

    for _ in range(AFTER + 1):
        run()
    refused = call.refused if isinstance(call, GraphCache) else ""
    return Made(run, details={**details, "file_bytes": size, "cuda_graph_refused": refused})
