"""Lower a program to a TensorRT plan: our ONNX through TensorRT's parser, or torch_tensorrt.

A plan is machine code for one GPU model, made on it.  None of this was run on real TensorRT by us
yet.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch

from enginecast.errors import LoweringError, MissingError
from enginecast.exporters.onnx import GRAPH_FILE, Lowered, lower_to_onnx
from enginecast.exporters.onnx import op_counts as network_ops
from enginecast.exporters.order import Order
from enginecast.exporters.readers import onnxruntime_on
from enginecast.exporters.tensorrt_build import Fill, Request, build_plan
from enginecast.exporters.tensorrt_options import TensorRTOptions
from enginecast.exporters.tensorrt_profiles import profile_of
from enginecast.exporters.tensorrt_timing import memory_of
from enginecast.runtime.gpu import gpu_here
from enginecast.runtime.manifest import ShapeRange
from enginecast.runtime.tensorrt_fitness import requirements
from enginecast.runtime.tensorrt_library import import_tensorrt

PLAN_FILE = "engine.plan"
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
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Built:
    """A plan that is not written yet, and what was found on the way."""

    plan: Any
    """A buffer."""
    ops: Mapping[str, int]
    network: Network | None
    """None: there is none, by torch_tensorrt."""
    notes: tuple[str, ...] = ()


def lower_to_tensorrt(order: Order) -> Lowered:
    """Write `engine.plan`, and the network and its weights where the plan can be filled anew.

    Raises:
        MissingError: tensorrt is not installed or does not load, there is no GPU, or another one
            than was asked for.
        UsageError: an optimal shape does not fit the inputs.
        LoweringError: an op has no form, the parser or the builder refuses the network.  No file is
            left then.
    """
    trt = import_tensorrt(WHY)
    gpu = gpu_here(torch)
    if order.arch is not None and order.arch != gpu.arch:
        raise MissingError(
            f"--arch {order.arch}: the GPU here is {gpu.arch}, and TensorRT measures kernels on the"
            " GPU that they are for",
            hint=f"Export on a machine with {order.arch}.",
        )
    needs = requirements(trt, gpu, order.tensorrt)
    profile = profile_of(order.inputs, order.ranges, order.tensorrt)
    # Within the folder, so that files move into it without a copy.
    with tempfile.TemporaryDirectory(prefix=".tensorrt-", dir=order.folder) as scratch:
        built = _build(trt, order, profile, needs, Path(scratch))
        files = _place(built, order, Path(scratch))
    return _describe(trt, order, built, files, needs, profile)


def require_tensorrt(options: TensorRTOptions) -> None:
    """Ask for all that a build needs of this machine, before any work is done.

    Raises:
        MissingError: it is not here.
    """
    import_tensorrt(WHY)
    gpu_here(torch)


def _build(
    trt: Any,
    order: Order,
    profile: Sequence[ShapeRange],
    needs: Mapping[str, str],
    scratch: Path,
) -> Built:
    network = write_network(order, scratch)
    request = Request(
        profile,
        order.tensorrt,
        memory_of(order.tensorrt.timing_cache, needs),
        weights=sum((scratch / name).stat().st_size for name in network.files[1:]),
        tell=order.tell,
        say=order.say,
    )
    plan = build_plan(trt, parsed(trt, scratch / network.files[0], network.model), request)
    return Built(plan, network_ops(network.model), network, network.notes)


def write_network(order: Order, folder: Path) -> Network:
    """The program as ONNX for TensorRT."""
    lowered = lower_to_onnx(
        order.program,
        folder,
        outputs=order.outputs,
        symbols=order.symbols,
        shapes=order.shapes,
        reader=onnxruntime_on("cuda"),
    )
    return Network(ir.load(folder / GRAPH_FILE), lowered.files, lowered.notes)


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
        return parser  # it owns the weights that the network refers to

    return fill


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
        hint="--target onnxruntime does without TensorRT.",
    )


def _sentence(error: Any, nodes: Mapping[str | None, ir.Node]) -> str:
    text = " ".join(str(error.desc()).split())
    name, op = error.node_name(), error.node_operator()
    if not op:
        return text
    node = nodes.get(name)
    known = {} if node is None else node.metadata_props
    module, line = known.get("enginecast.module", ""), known.get("enginecast.line", "")
    place = " ".join(part for part in (module and f"of {module}", line and f"({line})") if part)
    return f"{op} '{name}'{place and ' '}{place}: {text}"


def _place(built: Built, order: Order, scratch: Path) -> tuple[str, ...]:
    """Move what stays into the order's folder: all of it, or nothing."""
    options = order.tensorrt
    kept = built.network.files if built.network and (options.refit or options.strip_weights) else ()
    (scratch / PLAN_FILE).write_bytes(memoryview(built.plan))
    names = (PLAN_FILE, *kept)
    try:
        for name in names:
            (scratch / name).rename(order.folder / name)
    except BaseException:
        for name in names:
            (order.folder / name).unlink(missing_ok=True)
        raise
    return names


def _describe(
    trt: Any,
    order: Order,
    built: Built,
    files: tuple[str, ...],
    needs: Mapping[str, str],
    profile: tuple[ShapeRange, ...],
) -> Lowered:
    # Of a network that only lies beside the plan, none is filled in: the plan has its weights.
    stripped = built.network is not None and order.tensorrt.strip_weights
    least = ">=" if order.tensorrt.version_compatible else "=="
    return Lowered(
        files,
        sum(built.ops.values()),
        dict(sorted(built.ops.items())),
        opset=0,
        domains={},
        minimum_runtime=f"tensorrt{least}{trt.__version__}",
        quantized=_quantized(built.ops),
        notes=built.notes,
        requires=needs,
        profile=profile,
        network=files[1] if stripped else None,
    )


def _quantized(ops: Mapping[str, int]) -> Literal["", "fp8"]:
    """TensorRT gets no other quantised values than fp8."""
    return "fp8" if any("quantize" in op.lower() for op in ops) else ""
