"""Lower a program to a plan of TensorRT or TensorRT-RTX: from our ONNX through their parser, or
with torch_tensorrt.

A plan of TensorRT is machine code for one GPU model, made on it; one of TensorRT-RTX is made on any
machine and compiled where it is loaded.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from enginecast.errors import LoweringError, MissingError, UsageError
from enginecast.exporters.files import all_or_none
from enginecast.exporters.onnx.lower import lowering as onnx_lowering
from enginecast.exporters.onnx.lower import onnx_model, op_counts, save_model
from enginecast.exporters.onnx.metadata import LINE, MODULE
from enginecast.exporters.onnx.workarounds import compute_in
from enginecast.exporters.program import op_counts as program_ops
from enginecast.exporters.target import Artifact, LoweringRequest
from enginecast.exporters.tensorrt.build import Fill, Job, Plan, build_plan, built_for
from enginecast.exporters.tensorrt.gate.check import check_ready, refusal_of
from enginecast.exporters.tensorrt.gate.operators import MX, lacks_bf16
from enginecast.exporters.tensorrt.options import (
    PROFILE,
    NetworkOptions,
    Route,
    TensorRTOptions,
)
from enginecast.exporters.tensorrt.profiles import left_out, profiles_of
from enginecast.exporters.tensorrt.torch_build import plan_by_torch
from enginecast.runtime.bundle.manifest import QuantizedFormat
from enginecast.runtime.device import gpu as gpus
from enginecast.runtime.sessions.tensorrt.errors import causes
from enginecast.runtime.sessions.tensorrt.fitness import portable_requirements, requirements
from enginecast.runtime.sessions.tensorrt.library import Library, import_tensorrt, library_of
from enginecast.runtime.sessions.tensorrt.versions import import_torch_tensorrt

PLAN_FILE = "engine.plan"
NETWORK_FILE, NETWORK_WEIGHTS_FILE = "network.onnx", "network.safetensors"
_LAYER = re.compile(r"\[ONNX Layer: (.*)\]")
ADDED = "added by the parser"
_SHOWN = 5
"""Errors of the parser that a message holds."""


@dataclass(frozen=True)
class Network:
    """The ONNX graph of a program, on disk."""

    model: ir.Model
    """Its weights are in the files."""
    files: tuple[str, ...]
    """The graph first."""


@dataclass(frozen=True)
class Built:
    """A plan that is not written yet, and details of its build."""

    plan: Any
    """A buffer."""
    ops: Mapping[str, int]
    network: tuple[str, ...] = ()
    """Files of the network that was read, the graph first; empty: there is none."""
    log: tuple[str, ...] = ()
    quantized: QuantizedFormat = ""


def lowering(route: Route) -> str:
    """The passes that bring a program into the form that a route translates, as a spec."""
    if route == "onnx":
        return onnx_lowering("tensorrt")
    return (
        "drop-assertions,decompose-fused,keep-norms-whole,lift-weights,hoist-weights,"
        "dequantize-tables,flatten-calls"
    )


def lower_to_tensorrt(order: LoweringRequest, library: Library) -> Artifact:
    """Write `engine.plan`, and the network and its weights where the plan can be filled anew, or
    where nothing here runs the plan and the network is checked in its place.

    Raises:
        MissingError: the library is not installed or does not load, or there is no GPU, or another
            one than was asked for, and the library needs it.
        UsageError: a shape does not fit the inputs, or TensorRT builds no plans for the GPU.
        LoweringError: an op has no form, the parser or the builder refuses the network.  No file is
            left then.
    """
    options = order.options
    trt = require_library(library, options)
    profiles = profiles_of(order.inputs, order.ranges, options, order.sums, order.steps)
    needs: Mapping[str, str] = {}
    if not library.builds_without_gpu:
        compatible = options.version_compatible
        needs = requirements(
            trt, gpus.Gpu(torch), hardware=options.hardware, version_compatible=compatible
        )
    job = Job(trt, order, profiles, needs)
    by_torch = isinstance(options, TensorRTOptions) and options.route == "torch"
    # Within the folder, so that files move into it without a copy.
    with tempfile.TemporaryDirectory(prefix=".tensorrt-", dir=order.folder) as scratch:
        built = _by_torch(job) if by_torch else _by_onnx(job, Path(scratch))
        return _place(job, built, Path(scratch))


def require_library(library: Library, options: NetworkOptions) -> Any:
    """The module of a library, with all that a build needs of this machine.

    Raises:
        MissingError: it is not here.
        UsageError: the library does not build for a GPU that was asked for.
    """
    trt = import_tensorrt(f"--target {library.name}", library)
    if library.builds_without_gpu:
        built_for(trt, options, None)
        refills = options.refit or options.strip_weights
        if refills and not torch.cuda.is_available():
            option = "--strip-weights" if options.strip_weights else "--target-option refit=true"
            raise MissingError(
                f"{option}: {library.version(trt)} compiles what fills the weights in on a GPU, and"
                " torch sees none here",
                hint=f"Leave {option} out, or export on a machine with a GPU.",
            )
        return trt
    gpus.Gpu(torch)
    if isinstance(options, TensorRTOptions) and options.route == "torch":
        import_torch_tensorrt(
            "--target-option route=torch",
            torch=torch.__version__,
            tensorrt=trt.__version__,
            cuda=torch.version.cuda,
        )
    return trt


def _by_onnx(job: Job, scratch: Path) -> Built:
    """Our ONNX, checked, and then read by the library's parser."""
    network = write_network(job, scratch)
    weights = sum((scratch / name).stat().st_size for name in network.files[1:])
    fill = parsed(job.trt, scratch / network.files[0], network.model)
    plan = build_plan(job, fill, weights)
    log = _log(job, plan, network.model)
    quantized = quantized_format(network.model)
    return Built(plan.content, op_counts(network.model), network.files, log, quantized)


def _by_torch(job: Job) -> Built:
    """torch_tensorrt, which builds for itself."""
    order = job.order
    if len(order.options.profiles) > 1:
        raise UsageError(
            f"{PROFILE}: --target-option route=torch builds one profile, got"
            f" {len(order.options.profiles)}"
        )
    assert job.memory is not None  # TensorRT measures
    # It reads and writes TensorRT's own form of a timing cache.
    cache = job.memory.cache.with_suffix(".torch.cache")
    cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = job.profiles[-1] if job.profiles else ()  # the last one takes every shape
    plan = plan_by_torch(order, job.trt, whole, cache)
    ops = program_ops(order.program)
    # torch_tensorrt gets no other quantized values than fp8.
    return Built(plan, ops, quantized="fp8" if any("quantize" in op for op in ops) else "")


def _log(job: Job, plan: Plan, model: ir.Model) -> tuple[str, ...]:
    """What a build did, for build.log: its time, layers by module, warnings."""
    modules = {
        node.name or "": node.metadata_props.get(MODULE, "") for node in model.graph.all_nodes()
    }
    counts = Counter[str]()
    for said, count in plan.layers.items():
        found = _LAYER.fullmatch(said)
        counts[modules.get(found[1]) or "(root)" if found else ADDED] += count
    profiles = f"{max(1, len(job.profiles))} profile{'s' if len(job.profiles) > 1 else ''}"
    return (
        f"{job.library.version(job.trt)}: {sum(counts.values())} layers, {profiles}, built in"
        f" {plan.seconds:.2f} s",
        *(
            f"layers {name if name == ADDED else f'of {name}'}: {count}"
            for name, count in sorted(counts.items())
        ),
        *(f"warning: {' '.join(text.split())}" for text in plan.warnings),
    )


def write_network(job: Job, folder: Path) -> Network:
    """The program as an ONNX file, without what the builder is known to refuse.

    Raises:
        LoweringError: an op has no form in ONNX, or none that TensorRT takes.
    """
    order, library = job.order, job.library
    model = tensorrt_onnx(order)
    found = check_ready(
        model,
        plugins=library.has_plugins,
        parsed=True,  # it is, next
        inputs=order.inputs,
        ranges=order.ranges,
    )
    if found:
        raise refusal_of(found, library.version(job.trt), library.name)
    files = save_model(model, folder, graph=NETWORK_FILE, weights=NETWORK_WEIGHTS_FILE)
    return Network(model, files)


def tensorrt_onnx(order: LoweringRequest) -> ir.Model:
    """The graph that TensorRT's parser reads, in memory, its weights promised: computed when they
    are written.  Ops of ONNX's own alone; every dtype is in the graph, and no op mixes two.

    Every node has `MODULE` and `LINE` in its metadata where they are known.

    Raises:
        LoweringError: an op has no ONNX form, or values are quantized in one that TensorRT lacks;
            names it with module and source line.
    """
    model = onnx_model(order, "tensorrt")
    nodes = list(model.graph.all_nodes())
    foreign = next((n for n in nodes if n.domain and (n.domain, n.op_type) != MX), None)
    if foreign is not None:
        known = foreign.metadata_props
        raise LoweringError(
            f"TensorRT's parser has no {foreign.domain}::{foreign.op_type} (module"
            f" '{known.get(MODULE, '')}', {known.get(LINE, 'no source line')})",
            hint="A TensorRT engine can use only standard ONNX ops.",
        )
    used = {node.domain for node in nodes}
    for domain in [name for name in model.opset_imports if name and name not in used]:
        del model.opset_imports[domain]
    for node in list(model.graph.all_nodes()):
        if lacks_bf16(node.op_type):
            compute_in(node, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
    return model


_FORMATS: Mapping[ir.DataType, QuantizedFormat] = {
    ir.DataType.FLOAT4E2M1: "nvfp4",
    ir.DataType.INT4: "int4",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.INT8: "int8",
}
"""Narrowest first."""


def quantized_format(model: ir.Model) -> QuantizedFormat:
    """What a network's weights are quantized to, of several formats the narrowest."""
    held = {value.dtype for value in model.graph.initializers.values()}
    for dtype, name in _FORMATS.items():
        if dtype in held:
            is_mx = name == "fp8" and any((n.domain, n.op_type) == MX for n in model.graph)
            return "mxfp8" if is_mx else name
    return ""


def parsed(trt: Any, path: Path, model: ir.Model) -> Fill:
    """What reads an ONNX file into a network.

    Args:
        path: of the graph; its weights lie beside it.
        model: the same graph, which knows the modules of its nodes.
    """

    def fill(network: Any, logger: Any) -> Any:
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(path)):
            raise _refused(trt, parser, model)
        let_attentions_decompose(trt, network)
        return parser  # it owns the weights that the network refers to

    return fill


def let_attentions_decompose(trt: Any, network: Any) -> int:
    """Let TensorRT take an attention apart for which it has no fused kernel; how many there are.

    Unless `IAttention.decomposable` is set, such a network is refused when it is built, and which
    kernels there are depends on dtype, head size, mask and GPU (NVIDIA's API reference of
    IAttention, and https://github.com/NVIDIA/TensorRT-Model-Connect/pull/873).  ONNX cannot say it:
    neither onnx.checker nor ONNX Runtime would take a file with the parser's own attribute.
    """
    layers = map(network.get_layer, range(network.num_layers))
    found = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_OUTPUT]
    for layer in found:
        if not hasattr(layer, "attention"):  # the bindings give a plain ILayer
            layer.__class__ = trt.IAttentionOutputLayer
        layer.attention.decomposable = True
    return len(found)


def _refused(trt: Any, parser: Any, model: ir.Model) -> LoweringError:
    """What the parser found, with the modules that the nodes come from."""
    nodes = {node.name: node for node in model.graph.all_nodes()}
    count = parser.num_errors
    errors = [parser.get_error(index) for index in range(min(count, _SHOWN))]
    said = [_sentence(error, nodes) for error in errors] or ["it gave no reason"]
    if count > _SHOWN:
        said.append(f"and {count - _SHOWN} more")
    library = library_of(trt)
    return LoweringError(
        f"{library.version(trt)} does not take this network: {'; '.join(said)}",
        hint=f"--target onnxruntime does not need {library.title}.",
    )


def _sentence(error: Any, nodes: Mapping[str | None, ir.Node]) -> str:
    text = " ".join(" ".join(causes(str(error.desc()).splitlines())).split())
    name, op = error.node_name(), error.node_operator()
    if not op:
        return text
    if text == "false":  # all that the parser says of an operator that it does not have
        text = error.code().name.lower().replace("_", " ")
    node = nodes.get(name)
    known = {} if node is None else node.metadata_props
    module, line = known.get(MODULE, ""), known.get(LINE, "")
    place = " ".join(part for part in (module and f"of {module}", line and f"({line})") if part)
    return f"{op} '{name}'{place and ' '}{place}: {text}"


def _place(job: Job, built: Built, scratch: Path) -> Artifact:
    """Move what stays into the order's folder: all of it, or nothing."""
    order, library, options = job.order, job.library, job.order.options
    refits = options.refit or options.strip_weights
    only_here = built.network if library.builds_without_gpu and not refits else ()
    (scratch / PLAN_FILE).write_bytes(memoryview(built.plan))
    files = (PLAN_FILE, *(built.network if refits else ()))
    with all_or_none(order.folder, (*files, *only_here)):
        for name in (*files, *only_here):
            (scratch / name).rename(order.folder / name)
    version = job.trt.__version__
    newer = isinstance(options, TensorRTOptions) and options.version_compatible
    needs = job.needs
    if library.builds_without_gpu:
        capabilities = built_for(job.trt, options, order.arch)
        needs = portable_requirements(job.trt, capabilities, built.quantized)
    return Artifact(
        files,
        dict(sorted(built.ops.items())),
        minimum_runtime=f"{library.name}{'>=' if newer else '=='}{version}",
        quantized=built.quantized,
        requires=needs,
        record={
            "profile": tuple(one for profile in job.profiles for one in profile),
            # A network that lies beside a plan with weights is for those who change them.
            "network": files[1] if options.strip_weights else None,
            "built_by": library.version(job.trt),
        },
        only_here=only_here,
        log=built.log,
        notes=left_out(order.inputs, order.ranges, order.steps, job.profiles),
    )
