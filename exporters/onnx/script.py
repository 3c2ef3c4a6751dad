"""Write a hybrid of script and trace as ONNX with If and Loop, by torch's legacy exporter: the
current one takes no TorchScript.

It has folded away branches without a word, so the branches of the graph are counted before and
after.
"""

import inspect
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from torch import Tensor

from enginecast.errors import LoweringError, MissingError
from enginecast.exporters.onnx.convert import quiet
from enginecast.exporters.onnx.lower import GRAPH_FILE, op_counts
from enginecast.exporters.onnx.weights import store_weights
from enginecast.exporters.target import Artifact, ScriptRequest
from enginecast.exporters.torchscript.lower import no_deprecations, nodes_of
from enginecast.exporters.weights.file import WEIGHTS_FILE
from enginecast.version import __version__

LEGACY_OPSET = 20
"""The newest that torch's legacy exporter writes."""
_BRANCHES = ("If", "Loop")


def lower_script_to_onnx(request: ScriptRequest) -> Artifact:
    """Write `engine.onnx` and `weights.safetensors`.

    Raises:
        LoweringError: an op has no ONNX form, or a branch or loop was lost on the way.  No file is
            left then.
        MissingError: this torch has no legacy exporter any more.
    """
    module, folder = request.module, request.folder
    expected = branches(module)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / GRAPH_FILE
        dims = {**request.input_dims, **request.output_dims}
        axes = {name: dict(varying) for name, varying in dims.items() if varying}
        _export(module, path, request.example, request.outputs, axes)
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
    return Artifact(
        files,
        dict(sorted(counted.items())),
        "onnxruntime>=1.28",
        opset=model.opset_imports[""],
        domains=dict(sorted(model.opset_imports.items())),
    )


def branches(module: torch.jit.ScriptModule) -> int:
    """How many branches and loops depend on inputs: those left when constants are folded."""
    with no_deprecations():
        frozen = torch.jit.freeze(module.eval())
    kinds = [node.kind() for node in nodes_of(frozen.graph)]
    return sum(kinds.count(f"prim::{kind}") for kind in _BRANCHES)


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
        with no_deprecations(), quiet(), _no_graph_dump(), torch.no_grad():
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
