"""Write a hybrid of script and trace as a TorchScript engine file."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from enginecast.errors import LoweringError
from enginecast.exporters.target import Artifact

ENGINE_FILE = "model.ts.pt"
_MADE_BY_WRITER = ("version", "byteorder", ".data/serialization_id")
_PATHS = ".debug_pkl"
"""Records that hold paths of the machine that exported, for messages only."""


def write_torchscript(module: torch.jit.ScriptModule, folder: Path) -> Artifact:
    """Write `model.ts.pt`; equal modules give equal bytes, and no path of this machine is in it.

    Args:
        module: as `capture.torchscript.script.hybrid` made it.
        folder: where the file goes; it exists.

    Raises:
        LoweringError: TorchScript cannot store the module.
    """
    path = folder / ENGINE_FILE
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch) / ENGINE_FILE  # the file's name stands in the archive
        try:
            with no_deprecations():
                torch.jit.save(module, written)
        except RuntimeError as error:
            path.unlink(missing_ok=True)
            first = next(iter(str(error).strip().splitlines()), "")
            raise LoweringError(f"TorchScript cannot store the model: {first}") from error
        _without_paths(written, path)
    counted = graph_ops(module)
    return Artifact(
        (ENGINE_FILE,),
        dict(sorted(counted.items())),
        f"torch>={'.'.join(torch.__version__.split('.')[:2])}",
    )


def graph_ops(module: torch.jit.ScriptModule) -> dict[str, int]:
    """How often each op stands in the graph, such as "aten::linear", "prim::If"; constants and
    attributes are left out.
    """
    counted: dict[str, int] = {}
    for node in nodes_of(module.inlined_graph):
        kind = node.kind()
        if kind not in ("prim::Constant", "prim::GetAttr"):
            counted[kind] = counted.get(kind, 0) + 1
    return counted


def nodes_of(block: Any) -> Iterator[Any]:
    """All nodes of a TorchScript graph, those in branches and loops included."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes_of(inner)


def _without_paths(source: Path, target: Path) -> None:
    reader = torch._C.PyTorchFileReader(str(source))
    writer = torch._C.PyTorchFileWriter(str(target))
    for name in reader.get_all_records():
        if not name.endswith(_PATHS) and name not in _MADE_BY_WRITER:
            record = reader.get_record(name)
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()


@contextmanager
def no_deprecations() -> Iterator[None]:
    """The deprecation of TorchScript is told once, in the notes of the export; what the tracer
    suspects was collected when the hybrid was made.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
