"""What a call of an engine costs beside ONNX Runtime's own `run` of its file, in microseconds.

    python benchmarks/call_overhead.py [--rounds N] [--out FILE.json]

A tiny model, one thread; rounds of calls of both in turns.  The result, with versions, machine and
commit, goes to benchmarks/results/call-overhead.json.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
import torch
from large import RESULTS, machine
from torch import Tensor, nn

import enginecast
from enginecast.bench.timing import interleaved


class Small(nn.Module):
    """Two inputs, two outputs, and next to no work."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, state: Tensor) -> dict[str, Tensor]:
        return {"y": torch.tanh(self.linear(x)), "next": state + 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "call-overhead.json")
    options = parser.parse_args()
    found_machine = machine()  # before the run: the commit that is measured
    torch.manual_seed(0)
    example = {"x": torch.randn(3, 64), "state": torch.randn(3, 64)}
    feeds = {name: tensor.numpy() for name, tensor in example.items()}
    with tempfile.TemporaryDirectory() as folder:
        bundle = enginecast.compile(Small(), f"{folder}/bundle", example=example)
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = 1
        file = bundle.root / bundle.manifest.engines[0].file
        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(str(file), session_options, providers=providers)
        with enginecast.load(bundle.root, threads=1) as engine:
            calls: dict[str, Callable[[], object]] = {
                "engine": lambda: engine.run(feeds),
                "onnxruntime": lambda: session.run(None, feeds),
            }
            for output, wanted in zip(
                engine.run(feeds).values(), session.run(None, feeds), strict=True
            ):
                np.testing.assert_array_equal(output, wanted)
            times = interleaved(calls, rounds=options.rounds)
    samples = {name: [1e3 * each for each in found.wall] for name, found in times.items()}
    more = [
        one - other for one, other in zip(samples["engine"], samples["onnxruntime"], strict=True)
    ]
    result = {
        "microseconds": {name: round(median(found), 1) for name, found in samples.items()},
        "more": {"median": round(median(more), 1), "least": round(min(more), 1)},
        "rounds": options.rounds,
        "machine": found_machine,
    }
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
