"""What loading an engine of 400 MB takes: time and memory, alone and beside a second process.

    python benchmarks/loading.py [--rounds N] [--out FILE.json]

A chain of linears with random weights, one thread; every measurement is a process of its own, whose
files are in the page cache.  The result, with versions, machine and commit, goes to
benchmarks/results/loading.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from large import RESULTS, machine
from torch import Tensor, nn

import enginecast

WIDTH, LAYERS = 2048, 24
WAYS = {
    "load": "",
    "check size": "check='size'",
    "no prepacking": "tuned=Settings(prepack=False)",
    "no prepacking, check size": "tuned=Settings(prepack=False), check='size'",
}
CHILD = """
import json, sys, time
import numpy as np
from enginecast.runtime.load import load
from enginecast.runtime.sessions.settings import Settings

def memory(field):
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(field + ":"))

before, wall, cpu = memory("Pss"), time.perf_counter(), time.process_time()
engine = load({bundle!r}, threads=1, {how})
spent = {{"wall_ms": time.perf_counter() - wall, "cpu_ms": time.process_time() - cpu}}
engine.run({{"x": np.ones((4, {width}), np.float32)}})
found = {{name: 1e3 * seconds for name, seconds in spent.items()}}
found |= {{"pss_mb": memory("Pss") - before, "anonymous_mb": memory("Anonymous")}}
print(json.dumps(found), flush=True)
sys.stdin.read()  # until the other process has been measured
"""


class Chain(nn.Module):
    """Linears alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "loading.json")
    options = parser.parse_args()
    found_machine = machine()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        example = {"x": torch.randn(4, WIDTH)}
        bundle = enginecast.compile(Chain(), f"{folder}/bundle", example=example, threads=1)
        weights = sum(
            file.size for file in bundle.manifest.files if file.name.startswith("weights")
        )
        rows = {way: row(bundle.root, way, options.rounds) for way in WAYS}
    imports = [imported() for _ in range(options.rounds)]
    result = {
        "weight_bytes": weights,
        "import_ms": {key: round(median(one[key] for one in imports), 1) for key in imports[0]},
        "rows": rows,
        "rounds": options.rounds,
        "machine": found_machine,
    }
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, sort_keys=True))


def row(bundle: Path, way: str, rounds: int) -> dict[str, Any]:
    """Medians of several processes, and the memory of two at once."""
    found = []
    for _ in range(rounds):
        with started(bundle, way) as first:
            found.append(read(first))
            first.communicate("")
    with started(bundle, way) as first, started(bundle, way) as second:
        read(first)
        read(second)
        both = sum(memory("Pss", process.pid) for process in (first, second))
        for process in (first, second):
            process.communicate("")
    medians = {key: round(median(one[key] for one in found), 1) for key in found[0]}
    return medians | {"pss_of_two_mb": round(both, 1)}


def started(bundle: Path, way: str) -> subprocess.Popen[str]:
    code = CHILD.format(bundle=str(bundle), how=WAYS[way], width=WIDTH)
    return subprocess.Popen(
        [sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def read(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    found: dict[str, float] = json.loads(process.stdout.readline())
    return found


def memory(field: str, process: int) -> float:
    """Megabytes of a process: "Pss" counts shared pages by their share."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1e3


def imported() -> dict[str, float]:
    """CPU milliseconds of a process that imports, without those of a bare one."""

    def spent(code: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        return 1e3 * sum(
            getattr(after, kind) - getattr(before, kind)
            for kind in ("children_user", "children_system")
        )

    bare = spent("pass")
    return {
        "enginecast": spent("import enginecast") - bare,
        "enginecast.load": spent("import enginecast; enginecast.load") - bare,
        "onnxruntime": spent("import onnxruntime") - bare,
    }


if __name__ == "__main__":
    main()
