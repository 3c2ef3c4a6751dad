"""Write a hybrid of script and trace: as a TorchScript engine file, or as ONNX with If and Loop.

The second way is torch's legacy exporter: the current one takes no TorchScript.  It has folded
away branches without a word, so the branches of the graph are counted before and after.  All that
writes TorchScript is in this file.
"""

import inspect
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from torch import Tensor

from enginecast import __version__
from enginecast.errors import LoweringError, MissingError
from enginecast.exporters.onnx import GRAPH_FILE, WEIGHTS_FILE, Lowered, op_counts
from enginecast.exporters.onnx_convert import quiet
from enginecast.exporters.onnx_weights import store_weights

ENGINE_FILE = "model.ts.pt"
LEGACY_OPSET = 20
"""The newest that torch's legacy exporter writes."""
_BRANCHES = ("If", "Loop")
_MADE_BY_WRITER = ("version", "byteorder", ".data/serialization_id")
_PATHS = ".debug_pkl"
"""Records that hold paths of the machine that exported, for messages only."""


def write_torchscript(module: torch.jit.ScriptModule, folder: Path) -> Lowered:
    """Write `model.ts.pt`; equal modules give equal bytes, and no path of this machine is in it.

    Args:
        module: as `capture.torchscript.hybrid` made it.
        folder: where the file goes; it exists.

    Raises:
        LoweringError: TorchScript cannot store the module.
    """
    path = folder / ENGINE_FILE
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch) / ENGINE_FILE  # the file's name stands in the archive
        try:
            with _no_deprecations():
                torch.jit.save(module, written)
        except RuntimeError as error:
            path.unlink(missing_ok=True)
            first = next(iter(str(error).strip().splitlines()), "")
            raise LoweringError(f"TorchScript cannot store the model: {first}") from error
        _without_paths(written, path)
    counted = graph_ops(module)
    return Lowered(
        (ENGINE_FILE,),
        sum(counted.values()),
        dict(sorted(counted.items())),
        0,
        {},
        f"torch>={'.'.join(torch.__version__.split('.')[:2])}",
    )


def graph_ops(module: torch.jit.ScriptModule) -> dict[str, int]:
    """How often each op stands in the graph, such as "aten::linear", "prim::If"; constants and
    attributes are left out.
    """
    counted: dict[str, int] = {}
    for node in _nodes(module.inlined_graph):
        kind = node.kind()
        if kind not in ("prim::Constant", "prim::GetAttr"):
            counted[kind] = counted.get(kind, 0) + 1
    return counted


def lower_script_to_onnx(
    module: torch.jit.ScriptModule,
    folder: Path,
    *,
    example: Mapping[str, Tensor],
    outputs: Sequence[str],
    input_dims: Mapping[str, Mapping[int, str]],
    output_dims: Mapping[str, Mapping[int, str]],
) -> Lowered:
    """Write `engine.onnx` and `weights.safetensors` with torch's legacy exporter.

    Args:
        module: as `capture.torchscript.hybrid` made it.
        folder: where the files go; it exists.
        example: inputs by name, in order.
        outputs: names of the outputs, in order.
        input_dims: input -> dimension -> symbol, for the dimensions that vary.
        output_dims: likewise of the outputs.

    Raises:
        LoweringError: an op has no ONNX form, or a branch or loop was lost on the way.  No file is
            left then.
        MissingError: this torch has no legacy exporter any more.
    """
    expected = branches(module)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / GRAPH_FILE
        axes = {name: dict(dims) for name, dims in {**input_dims, **output_dims}.items() if dims}
        _export(module, path, example, outputs, axes)
        model = ir.load(path)
        counted = op_counts(model)
        found = sum(counted[kind] for kind in _BRANCHES)
        if found < expected:
            raise LoweringError(
                f"torch's legacy ONNX exporter keeps {found} of {expected} branches and loops: it"
                " has baked the others",
                hint="--target torchscript keeps all of them.",
            )
        _clean(model)
        try:
            stored = store_weights(model, folder / WEIGHTS_FILE)
            ir.save(model, folder / GRAPH_FILE)
        except BaseException:
            for name in (GRAPH_FILE, WEIGHTS_FILE):
                (folder / name).unlink(missing_ok=True)
            raise
    files = (GRAPH_FILE, *((WEIGHTS_FILE,) if stored else ()))
    return Lowered(
        files,
        sum(counted.values()),
        dict(sorted(counted.items())),
        model.opset_imports[""],
        dict(sorted(model.opset_imports.items())),
        "onnxruntime>=1.28",
    )


def branches(module: torch.jit.ScriptModule) -> int:
    """How many branches and loops depend on inputs: those left when constants are folded."""
    with _no_deprecations():
        frozen = torch.jit.freeze(module.eval())
    kinds = [node.kind() for node in _nodes(frozen.graph)]
    return sum(kinds.count(f"prim::{kind}") for kind in _BRANCHES)


def _nodes(block: Any) -> Iterator[Any]:
    """All nodes of a TorchScript graph, those in branches and loops included."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _export(
    module: torch.jit.ScriptModule,
    path: Path,
    example: Mapping[str, Tensor],
    outputs: Sequence[str],
    axes: dict[str, dict[int, str]],
) -> None:
    if "dynamo" not in inspect.signature(torch.onnx.export).parameters:
        raise MissingError(
            f"torch {torch.__version__} has no legacy ONNX exporter any more (dynamo=False)",
            hint="Use torch 2.11 to 2.13, or --target torchscript.",
        )
    try:
        with _no_deprecations(), quiet(), _no_graph_dump(), torch.no_grad():
            torch.onnx.export(
                module,
                tuple(example.values()),
                path,
                dynamo=False,
                opset_version=LEGACY_OPSET,
                input_names=list(example),
                output_names=list(outputs),
                dynamic_axes=axes,
            )
    except Exception as error:  # torch raises many kinds
        first = next(iter(str(error).strip().splitlines()), "").strip()
        raise LoweringError(
            f"torch's legacy ONNX exporter refuses the scripted model: {type(error).__name__}:"
            f" {first[:200]}",
            hint="--target torchscript needs no ONNX form of it.",
        ) from error


def _clean(model: ir.Model) -> None:
    """Unique names, and no stack traces: they hold paths of the machine that exported."""
    model.producer_name, model.producer_version = "enginecast", __version__
    NameFixPass()(model)
    for node in model.graph.all_nodes():
        node.doc_string = None
        node.metadata_props.clear()
    model.graph.doc_string = None


def _without_paths(source: Path, target: Path) -> None:
    reader = torch._C.PyTorchFileReader(str(source))
    writer = torch._C.PyTorchFileWriter(str(target))
    for name in reader.get_all_records():
        if not name.endswith(_PATHS) and name not in _MADE_BY_WRITER:
            record = reader.get_record(name)
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()


@contextmanager
def _no_graph_dump() -> Iterator[None]:
    """The exporter prints a graph that it refuses on stdout, from C++: its switch has no effect."""
    before = getattr(torch._C, "_jit_onnx_log", None)
    torch._C._jit_onnx_log = lambda *_: None
    try:
        yield
    finally:
        if before is not None:
            torch._C._jit_onnx_log = before


@contextmanager
def _no_deprecations() -> Iterator[None]:
    """The deprecation of TorchScript is told once, in the notes of the export; what the tracer
    suspects was collected when the hybrid was made.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
