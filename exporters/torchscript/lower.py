"""Write a hybrid of script and trace as a TorchScript engine file."""

import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from enginecast.errors import LoweringError, first_line
from enginecast.exporters.files import copy_archive, quiet
from enginecast.exporters.target import Artifact

ENGINE_FILE = "model.ts.pt"
BRANCHES = ("If", "Loop")


def write_torchscript(module: torch.jit.ScriptModule, folder: Path) -> Artifact:
    """Write `model.ts.pt`; equal modules give equal bytes, and no path of this machine is in it.

    Raises:
        LoweringError: TorchScript cannot store the module.
    """
    path = folder / ENGINE_FILE
    content = io.BytesIO()  # on a full disk torch.jit.save ends the process
    try:
        with quiet():  # its deprecation is reported once, in the notes of the export
            torch.jit.save(module, content)
    except RuntimeError as error:
        message = f"TorchScript cannot store the model: {first_line(error)}"
        raise LoweringError(message) from error
    content.seek(0)
    copy_archive(content, path, without=(".debug_pkl",))  # which is for messages only
    version = ".".join(torch.__version__.split(".")[:2])
    return Artifact((ENGINE_FILE,), graph_ops(module), f"torch>={version}")


def graph_ops(module: torch.jit.ScriptModule) -> dict[str, int]:
    """How often each op stands in the graph, such as "aten::linear", "prim::If"; constants and
    attributes are left out.
    """
    kinds = Counter(node.kind() for node in nodes_of(module.inlined_graph))
    return {k: kinds[k] for k in sorted(kinds) if k not in ("prim::Constant", "prim::GetAttr")}


def nodes_of(block: Any) -> Iterator[Any]:
    """All nodes of a TorchScript graph, those in branches and loops included."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes_of(inner)


def branches(module: torch.jit.ScriptModule) -> int:
    """How many branches and loops depend on inputs: those left when constants are folded."""
    with quiet():
        frozen = torch.jit.freeze(module.eval())
    kinds = [node.kind() for node in nodes_of(frozen.graph)]
    return sum(kinds.count(f"prim::{kind}") for kind in BRANCHES)
