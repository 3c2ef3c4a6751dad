"""A pass of another package, as if it were installed, for this process and those that it starts."""

import os
from pathlib import Path

import pytest

SOURCE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from enginecast.passes.ir.base import GraphPass
from enginecast.passes.ir.edit import insert
from enginecast.passes.ir.sites import SiteLog

aten = torch.ops.aten


@dataclass(frozen=True)
class Double(GraphPass):
    """Replace x + x by x * 2."""

    name: ClassVar[str] = "double"
    promise: ClassVar[str] = "exact"

    def run(self, program, context):
        log = SiteLog(context)
        for node in program.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            if node.args[0] is not node.args[1] or log.skipped(node):
                continue
            with program.graph.inserting_before(node):
                new = insert(program.graph, aten.mul.Tensor, (node.args[0], 2), like=node)
            node.replace_all_uses_with(new)
            log.done(node)
        return log.sites
'''
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = torch.relu(self.up(x))
        h = self.down(torch.tanh(h + h)).sigmoid()
        return h * x - 1.0


def make():
    torch.manual_seed(0)
    return Net(), {"x": torch.randn(3, 4)}
"""
RIGHT = "(node.args[0], 2)"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the package and a model beside the others; return the file of the pass."""
    info = folder / "enginecast_double-0.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: enginecast-double\nVersion: 0.3.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[enginecast.passes]\ndouble = enginecast_double:Double\n", encoding="utf-8"
    )
    (folder / "double_model.py").write_text(MODEL, encoding="utf-8")
    file = folder / "enginecast_double.py"
    file.write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return file
