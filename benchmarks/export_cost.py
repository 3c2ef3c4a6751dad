"""What an export costs, in CPU seconds, by the number of layers, beside plain torch.onnx.

    python benchmarks/export_cost.py [--layers 4 12 24] [--precision fp32] [--out FILE.json]

T5 v1.1-base shapes with seeded random weights.  Each export is a process of its own, imports
included; CPU seconds are user and system time of all its threads.  enginecast's include the
verification against eager; torch.onnx verifies nothing, and fails on weights that require
gradients, so its model is set up without them.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from large import RESULTS, machine
from transformers import T5Config, T5EncoderModel

PLAIN = """
import sys, torch
from transformers import T5EncoderModel
folder, out = sys.argv[1:]
model = T5EncoderModel.from_pretrained(folder).eval().requires_grad_(False)
ids = torch.randint(0, 32000, (3, 7))
batch, sequence = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("sequence", max=512)
shapes = {name: {0: batch, 1: sequence} for name in ("input_ids", "attention_mask")}
torch.onnx.export(
    model, (), out, kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    dynamo=True, dynamic_shapes=shapes, external_data=True, verbose=False,
)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 24])
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--out", type=Path, default=RESULTS / "export-cost.json")
    options = parser.parse_args()
    found_machine = machine()  # before the run: the commit that is measured
    rows = {str(count): compare(count, options.precision) for count in options.layers}
    result = {"layers": rows, "unit": "CPU seconds of the whole process", "machine": found_machine}
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1, sort_keys=True))
    print(options.out)


def compare(layers: int, precision: str) -> dict[str, Any]:
    """Export one model both ways."""
    with tempfile.TemporaryDirectory() as scratch:
        model, bundle = Path(scratch) / "model", Path(scratch) / "engine"
        config = T5Config(
            d_model=768,
            d_ff=2048,
            num_heads=12,
            num_layers=layers,
            feed_forward_proj="gated-gelu",
            architectures=["T5EncoderModel"],
        )
        torch.manual_seed(0)
        T5EncoderModel(config).save_pretrained(model)
        command = ["-m", "enginecast", "export", str(model), "-o", str(bundle)]
        ours, printed = cpu_seconds([*command, "--precision", precision, "--json"])
        found = json.loads(printed)
        plain, _ = cpu_seconds(["-c", PLAIN, str(model), str(Path(scratch) / "plain.onnx")])
    return {
        "enginecast": round(ours, 1),
        "torch.onnx": round(plain, 1),
        "ratio": round(ours / plain, 2),
        "outcome": found["outcome"],
        "steps_wall": {name: round(spent, 1) for name, spent in found["seconds"].items()},
        "anonymous_bytes": found["memory"]["anonymous"],
    }


def cpu_seconds(arguments: list[str]) -> tuple[float, str]:
    """CPU seconds of a Python process, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
    return spent, done.stdout


if __name__ == "__main__":
    main()
