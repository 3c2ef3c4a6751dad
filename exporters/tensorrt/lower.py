"""Lower a program to a TensorRT plan: from our ONNX through TensorRT's parser, or with
torch_tensorrt.

A plan is machine code for one GPU model, made on it.  None of this was run on real TensorRT by us
yet.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from enginecast.errors import LoweringError, MissingError
from enginecast.exporters.files import all_or_none
from enginecast.exporters.onnx.lower import lowering as onnx_lowering
from enginecast.exporters.onnx.lower import onnx_model, op_counts, save_model
from enginecast.exporters.onnx.metadata import LINE, MODULE
from enginecast.exporters.program import op_counts as program_ops
from enginecast.exporters.target import Artifact, LoweringRequest
from enginecast.exporters.tensorrt.build import Fill, Job, build_plan
from enginecast.exporters.tensorrt.gate.check import check_ready, refusal_of
from enginecast.exporters.tensorrt.options import Route, TensorRTOptions
from enginecast.exporters.tensorrt.profiles import profile_of
from enginecast.exporters.tensorrt.torch_build import plan_by_torch
from enginecast.runtime.device import gpu as gpus
from enginecast.runtime.device.versions import short_version
from enginecast.runtime.sessions.tensorrt.fitness import requirements
from enginecast.runtime.sessions.tensorrt.library import import_tensorrt
from enginecast.runtime.sessions.tensorrt.versions import import_torch_tensorrt

PLAN_FILE = "engine.plan"
NETWORK_FILE, NETWORK_WEIGHTS_FILE = "network.onnx", "network.safetensors"
WHY = "--target tensorrt"
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


def lowering(route: Route) -> str:
    """The passes that bring a program into the form that a route translates, as a spec."""
    if route == "onnx":
        return onnx_lowering("tensorrt")
    return (
        "drop-assertions,decompose-fused,keep-norms-whole,lift-weights,hoist-weights,"
        "dequantize-tables,flatten-calls"
    )


def lower_to_tensorrt(order: LoweringRequest) -> Artifact:
    """Write `engine.plan`, and the network and its weights where the plan can be filled anew.

    Raises:
        MissingError: tensorrt is not installed or does not load, there is no GPU, or another one
            than was asked for.
        UsageError: an optimal shape does not fit the inputs.
        LoweringError: an op has no form, the parser or the builder refuses the network.  No file is
            left then.
    """
    trt = import_tensorrt(WHY)
    gpu = gpus.Gpu(torch)
    if order.arch is not None and order.arch != gpu.arch:
        raise MissingError(
            f"--arch {order.arch}: the GPU here is {gpu.arch}, and TensorRT measures kernels on the"
            " GPU that they are for",
            hint=f"Export on a machine with {order.arch}.",
        )
    profile = profile_of(order.inputs, order.ranges, order.options)
    options = order.options
    needs = requirements(
        trt, gpu, hardware=options.hardware, version_compatible=options.version_compatible
    )
    job = Job(trt, order, profile, needs)
    # Within the folder, so that files move into it without a copy.
    with tempfile.TemporaryDirectory(prefix=".tensorrt-", dir=order.folder) as scratch:
        built = _ROUTES[order.options.route](job, Path(scratch))
        files = _place(built, order, Path(scratch))
    return _describe(job, built, files)


def require_tensorrt(options: TensorRTOptions) -> None:
    """Ask for all that a build needs of this machine, before any work is done.

    Raises:
        MissingError: it is not here.
    """
    trt = import_tensorrt(WHY)
    gpus.Gpu(torch)
    if options.route == "torch":
        import_torch_tensorrt(
            "--trt-route torch",
            torch=torch.__version__,
            tensorrt=trt.__version__,
            cuda=torch.version.cuda,
        )


def _by_onnx(job: Job, scratch: Path) -> Built:
    """Our ONNX, checked, and then read by TensorRT's parser."""
    network = write_network(job, scratch)
    weights = sum((scratch / name).stat().st_size for name in network.files[1:])
    fill = parsed(job.trt, scratch / network.files[0], network.model)
    return Built(build_plan(job, fill, weights), op_counts(network.model), network.files)


def _by_torch(job: Job, scratch: Path) -> Built:
    """torch_tensorrt, which builds for itself."""
    order = job.order
    # It reads and writes TensorRT's own form of a timing cache.
    cache = job.memory.cache.with_suffix(".torch.cache")
    cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    plan = plan_by_torch(order, job.trt, job.profile, cache)
    return Built(plan, program_ops(order.program))


def write_network(job: Job, folder: Path) -> Network:
    """The program as an ONNX file that TensorRT is documented to take.

    Raises:
        LoweringError: an op has no form in ONNX, or none that TensorRT takes.
    """
    order, version = job.order, short_version(job.trt.__version__)
    model = tensorrt_onnx(order)
    found = check_ready(model, version=version, inputs=order.inputs, ranges=order.ranges)
    if found:
        raise refusal_of(found, version)
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
    foreign = next((node for node in model.graph.all_nodes() if node.domain), None)
    if foreign is not None:
        known = foreign.metadata_props
        raise LoweringError(
            f"TensorRT's parser has no {foreign.domain}::{foreign.op_type} (module"
            f" '{known.get(MODULE, '')}', {known.get(LINE, 'no source line')})",
            hint="A TensorRT engine can use only standard ONNX ops.",
        )
    for domain in [name for name in model.opset_imports if name]:
        del model.opset_imports[domain]
    return model


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
    return LoweringError(
        f"TensorRT {trt.__version__} does not take this network: {'; '.join(said)}",
        hint="--target onnxruntime does not need TensorRT.",
    )


def _sentence(error: Any, nodes: Mapping[str | None, ir.Node]) -> str:
    text = " ".join(str(error.desc()).split())
    name, op = error.node_name(), error.node_operator()
    if not op:
        return text
    node = nodes.get(name)
    known = {} if node is None else node.metadata_props
    module, line = known.get(MODULE, ""), known.get(LINE, "")
    place = " ".join(part for part in (module and f"of {module}", line and f"({line})") if part)
    return f"{op} '{name}'{place and ' '}{place}: {text}"


def _place(built: Built, order: LoweringRequest, scratch: Path) -> tuple[str, ...]:
    """Move what stays into the order's folder: all of it, or nothing."""
    kept = built.network if order.options.refit or order.options.strip_weights else ()
    (scratch / PLAN_FILE).write_bytes(memoryview(built.plan))
    names = (PLAN_FILE, *kept)
    with all_or_none(order.folder, names):
        for name in names:
            (scratch / name).rename(order.folder / name)
    return names


def _describe(job: Job, built: Built, files: tuple[str, ...]) -> Artifact:
    options, version = job.order.options, job.trt.__version__
    return Artifact(
        files,
        dict(sorted(built.ops.items())),
        minimum_runtime=f"tensorrt{'>=' if options.version_compatible else '=='}{version}",
        # TensorRT gets no other quantized values than fp8.
        quantized="fp8" if any("quantize" in op.lower() for op in built.ops) else "",
        requires=job.needs,
        record={
            "profile": job.profile,
            # A network that lies beside a plan with weights is for those who change them.
            "network": files[1] if options.strip_weights else None,
        },
    )


_ROUTES: Mapping[Route, Callable[[Job, Path], Built]] = {"onnx": _by_onnx, "torch": _by_torch}
