"""Orders of TensorRT engines of small programs, on a machine that is made up."""

import functools
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_tensorrt import FakeTensorRT, fake_tensorrt, install
from programs import captured, rewritten
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt import lower as exporter
from enginecast.exporters.tensorrt.build import Job
from enginecast.exporters.tensorrt.lower import Network, lowering, write_network
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.exporters.tensorrt.profiles import profile_of
from enginecast.runtime.bundle.manifest import Input
from enginecast.runtime.device import gpu as gpus

FEATURES = 24


@dataclass(frozen=True)
class MadeUpGpu:
    """What is asked of a GPU when a plan is built; there is none."""

    name: str = "NVIDIA H200"
    arch: str = "sm90"
    driver: str = "580.95.05"
    cuda: str = "13"


class Small(nn.Module):
    """Two linears; the weights of the first are too large for the graph file."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(FEATURES, 48)
        self.narrow = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.narrow(torch.relu(self.wide(x)))
        return hidden


@functools.cache
def program() -> tuple[nn.Module, ExportedProgram]:
    """The small model and its program, for all tests."""
    torch.manual_seed(0)
    module = Small()
    dynamic = {0: Dim("batch", min=1, max=8)}
    return module, captured(module, torch.randn(3, FEATURES), dynamic=dynamic)


@functools.cache
def network() -> tuple[tempfile.TemporaryDirectory[str], Network]:
    """Its network, which every order of the program comes to: lowering takes a second."""
    folder = tempfile.TemporaryDirectory(prefix="enginecast-tests-")
    order = order_of(Path(folder.name), TensorRTOptions())
    profile = profile_of(order.inputs, order.ranges, order.options)
    job = Job(fake_tensorrt(), order, profile, {})
    return folder, write_network(job, Path(folder.name))


def copied_network(job: Job, folder: Path) -> Network:
    """The network of an order of this file's program, in a folder."""
    kept, made = network()
    for name in made.files:
        shutil.copy(Path(kept.name) / name, folder / name)
    return made


def order_of(folder: Path, options: TensorRTOptions, **changes: Any) -> LoweringRequest:
    """An order of the small program."""
    made = program()[1]
    (node,) = made.graph.find_nodes(op="placeholder")[-1:]
    given: dict[str, Any] = {
        "outputs": ["out"],
        "symbols": {str(node.meta["val"].shape[0]): "batch"},
        "shapes": [("batch", 5)],
        "device": "cuda",
        "inputs": [Input(name="x", kind="tensor", dtype="float32", shape=("batch", FEATURES))],
        "ranges": {"batch": (1, 8)},
        "options": options,
    }
    given |= changes
    ready, _ = rewritten(given.pop("program", made), lowering(options.route))
    return LoweringRequest(ready, folder, **given)


@dataclass
class Rig:
    """A fake TensorRT, an order, and what the order was given."""

    fake: FakeTensorRT
    folder: Path
    cache: Path
    said: list[str]
    reported: list[tuple[str, int, int]]

    def order(self, *, changes: Mapping[str, Any] | None = None, **options: Any) -> LoweringRequest:
        """An order of the small program with these options of a build."""
        listening: dict[str, Any] = {
            "tell": lambda *step: self.reported.append(step),
            "say": self.said.append,
        }
        wanted = TensorRTOptions(timing_cache=self.cache, **options)
        return order_of(self.folder, wanted, **listening | dict(changes or {}))

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def make_rig(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> Rig:
    """A rig whose `import tensorrt` gives the fake of a version."""
    fake = install(monkeypatch, version)
    monkeypatch.setattr(gpus, "Gpu", lambda torch: MadeUpGpu())
    monkeypatch.setattr(exporter, "write_network", copied_network)
    (folder / "bundle").mkdir()
    return Rig(fake, folder / "bundle", folder / "cache", [], [])
