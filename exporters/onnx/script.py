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

from enginecast.errors import LoweringError, MissingError, first_line
from enginecast.exporters.onnx.convert import quiet
from enginecast.exporters.onnx.lower import GRAPH_FILE, describe, op_counts, save_model
from enginecast.exporters.onnx.metadata import plain_metadata
from enginecast.exporters.target import Artifact, ScriptRequest
from enginecast.exporters.torchscript.lower import BRANCHES, branches
from enginecast.library_names import tested

LEGACY_OPSET = 20
"""The newest that torch's legacy exporter writes."""


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
        found = sum(counted[kind] for kind in BRANCHES)
        if found < expected:
            raise LoweringError(
                f"torch's legacy ONNX exporter keeps {found} of {expected} branches and loops: it"
                " has baked the others",
                hint="--target torchscript keeps all of them.",
            )
        NameFixPass()(model)
        plain_metadata(model)
        return describe(model, save_model(model, folder))


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
            hint=f"{tested('torch')} Or use --target torchscript.",
        )
    try:
        with quiet(), _no_graph_dump(), torch.no_grad():
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
        raise LoweringError(
            f"torch's legacy ONNX exporter refuses the scripted model: {type(error).__name__}:"
            f" {first_line(error)[:200]}",
            hint="--target torchscript needs no ONNX form of it.",
        ) from error


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
