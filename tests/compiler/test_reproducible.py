"""Equal models give equal files: whatever the order of dicts and tensors, the folder, the time."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from models import tiny_t5
from safetensors.torch import load_file, save_file

from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.weights.checkpoint import SINGLE
from enginecast.runtime.bundle.manifest_json import decode

FACTORY = """
import torch
from torch import nn


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(12, 40) for name in ("q", "k", "v")})
        self.norm = nn.LayerNorm(40)
        self.register_buffer("table", torch.randn(60, 40))

    def forward(self, x, y):
        parts = {name: layer(x) for name, layer in self.layers.items()}
        parts["sum"] = self.norm(sum(parts.values())) + self.table[:40].mean(0)
        parts["ids"] = parts["sum"].argmax(-1)
        parts["y"] = torch.nn.functional.gelu(y)
        return parts


def make():
    torch.manual_seed(3)
    return Several(), {"x": torch.randn(3, 7, 12), "y": torch.randn(3, 5)}
"""
EXPORT = """
import sys, time
late = float(sys.argv[1])
clock, count = time.time, time.perf_counter
time.time, time.perf_counter = lambda: clock() + late, lambda: count() * (1 + late)
import enginecast
enginecast.compile(sys.argv[2], sys.argv[3], precision="fp16", threads=1)
enginecast.compile("reproducible_factory:make", sys.argv[4], threads=1)
"""
EQUAL = ("engine.onnx", "weights.safetensors", "reference.safetensors")
TIMED = {"build.log", "report.json", "report.html"}


def model(folder: Path, *, shuffled: bool) -> Path:
    """A T5 of mixed dtypes; shuffled: the same one, its files written in another order."""
    made = tiny_t5(folder / "t5", dtype=torch.float16, layers=1)
    if shuffled:
        tensors = load_file(made / SINGLE)
        write_backwards(made / SINGLE, tensors)
        assert set(load_file(made / SINGLE)) == set(tensors)
    shuffle_config(made, backwards=shuffled)
    return made


def shuffle_config(folder: Path, *, backwards: bool) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(dict(sorted(config.items(), reverse=backwards))))


def write_backwards(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """`save_file` sorts by dtype and name, so this writes the format by hand."""
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    header = json.loads(before[8 : 8 + length])
    data, moved, position = before[8 + length :], {}, 0
    metadata = header.pop("__metadata__")
    for name in sorted(tensors, reverse=True):
        start, end = header[name]["data_offsets"]
        moved[name] = {**header[name], "data_offsets": [position, position + end - start]}
        position += end - start
    text = json.dumps({"__metadata__": metadata, **moved}).encode()
    text += b" " * (-len(text) % 8)
    parts = [data[slice(*header[name]["data_offsets"])] for name in moved]
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    assert path.read_bytes() != before


def check_equal(first: Path, second: Path, names: tuple[str, ...] = EQUAL) -> None:
    for name in names:
        digests = [hashlib.sha256((f / name).read_bytes()).hexdigest() for f in (first, second)]
        assert digests[0] == digests[1], name
    one, two = (decode((folder / "manifest.json").read_bytes()) for folder in (first, second))
    differ = {file.name for file in set(one.files) ^ set(two.files)}
    assert differ <= TIMED | (set(EQUAL) - set(names))
    assert msgspec.structs.replace(one, files=()) == msgspec.structs.replace(two, files=())


@pytest.mark.slow
def test_fresh_processes_make_equal_bundles(tmp_path: Path) -> None:
    bundles = []
    for run, (seed, late) in enumerate((("1", 0.0), ("77", 4e8))):
        folder = tmp_path / f"run{'x' * run}"
        made = model(folder, shuffled=False)
        shuffle_config(made, backwards=run == 1)
        (folder / "reproducible_factory.py").write_text(FACTORY, encoding="utf-8")
        outputs = [folder / f"{name}{run}.bundle" for name in ("t5", "several")]
        command = [sys.executable, "-c", EXPORT, str(late), str(made), *map(str, outputs)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        bundles.append(outputs)
    for first, second in zip(*bundles, strict=True):
        check_equal(first, second)


def test_another_weight_makes_another_bundle(tmp_path: Path) -> None:
    """What shows that the comparison above can fail."""
    fingerprints = []
    for change in (0.0, 0.5):
        made = model(tmp_path / str(change), shuffled=False)
        tensors = load_file(made / SINGLE)
        tensors["encoder.final_layer_norm.weight"] += change
        save_file(tensors, made / SINGLE, metadata={"format": "pt"})
        fingerprints.append(open_source(str(made)).fingerprint())
    assert fingerprints[0]["weights"] != fingerprints[1]["weights"]
    assert fingerprints[0]["config"] == fingerprints[1]["config"]
