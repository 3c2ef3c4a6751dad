"""What naming the culprit costs, beside the verification that found something wrong.

    python benchmarks/bisect_cost.py [--layers 4] [--repeats 3] [--out FILE.json]

A T5 encoder of v1.1-small shapes with seeded random weights, exported in one process: as it is, and
with a pass that does harm at one rewrite, at two, at a late one, or a little at all of them.  The
ratio is the time of the search over that of the verification in the same export (reference,
comparison after each pass, run in true fp16, engine; an export that is rejected runs no engine, so
that part is the clean export's).  Best of the repeats, one thread.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from large import RESULTS, machine
from torch.export import ExportedProgram
from transformers import T5Config, T5EncoderModel

from enginecast.compiler.publish import Export
from enginecast.compiler.request import ExportRequest
from enginecast.compiler.session import export
from enginecast.compiler.steps import Steps
from enginecast.passes import registry
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import aten, insert
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import module_path
from enginecast.passes.presets import preset

VERIFICATION = ("reference", "passes", "run the program in fp16", "verify")
LIMIT = 2.0
"""Of the ratio: what the project promises for four layers."""
LITTLE = {"fp32": "0.000002", "fp16": "0.004"}
HARM = {
    "one rewrite": "touch{wrong=block.1.layer.1.DenseReluDense.wi_0 by=0.02}",
    "two rewrites": (
        "touch{wrong=block.1.layer.1.DenseReluDense.wi_0,block.2.layer.0.SelfAttention.o by=0.02}"
    ),
    "a late rewrite": "touch{wrong=block.3.layer.1.DenseReluDense.wo by=0.02}",
    "all a little": "touch{wrong=o,wo by=LITTLE}",
}


@dataclass(frozen=True)
class Touch(Pass):
    """Every linear is a site; those whose module ends in one of `wrong` come out too large."""

    name: ClassVar[str] = "touch"
    promise: ClassVar[Promise] = "reordered"

    wrong: tuple[str, ...] = ()
    by: float = 0.0

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(program.graph.nodes):
            if node.target is not aten.linear.default or log.skipped(node):
                continue
            if f".{module_path(node)}".endswith(tuple(f".{end}" for end in self.wrong)):
                with program.graph.inserting_after(node):
                    made = insert(program.graph, aten.mul.Tensor, (node, 1 + self.by), like=node)
                node.replace_all_uses_with(made, delete_user_cb=lambda user, new=made: user != new)
            log.done(node)
        return log.sites


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "bisect-cost.json")
    options = parser.parse_args()
    found_machine = machine()  # before the run: the commit that is measured
    torch.set_num_threads(1)
    registry.PASSES = {**registry.PASSES, "touch": "bisect_cost:Touch"}
    with tempfile.TemporaryDirectory() as scratch:
        model = save(Path(scratch) / "model", options.layers)
        rows = {
            precision: compare(model, Path(scratch) / "engine", precision, options.repeats)
            for precision in ("fp32", "fp16")
        }
    worst = max(row["ratio"] for found in rows.values() for row in found["harm"].values())
    result = {
        "layers": options.layers,
        "precisions": rows,
        "worst_ratio": worst,
        "limit": LIMIT,
        "within_limit": worst < LIMIT,
        "unit": "seconds of wall clock, best of the repeats",
        "machine": found_machine,
    }
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1, sort_keys=True))
    print(options.out)


def save(folder: Path, layers: int) -> Path:
    """T5 v1.1-small with a small vocabulary."""
    config = T5Config(
        vocab_size=4096,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_heads=6,
        num_layers=layers,
        feed_forward_proj="gated-gelu",
        architectures=["T5EncoderModel"],
    )
    torch.manual_seed(0)
    T5EncoderModel(config).save_pretrained(folder)
    return folder


def compare(model: Path, output: Path, precision: str, repeats: int) -> dict[str, Any]:
    """Export clean and with each kind of harm, after unify-dtype where there is one."""
    pipeline = preset(precision)
    clean, _ = best(model, output, pipeline, repeats)
    unify, _, rest = pipeline.rpartition("canonicalize,")
    harm = {
        name: searched(model, output, f"{unify}canonicalize,{spec},{rest}", repeats, clean)
        for name, spec in harm_in(precision).items()
    }
    verification = {step: round(clean[step], 2) for step in VERIFICATION if step in clean}
    return {"verification": verification, "harm": harm}


def harm_in(precision: str) -> dict[str, str]:
    """The specs of the harmful passes; a little is a few roundings."""
    little = LITTLE[precision]
    return {name: spec.replace("LITTLE", little) for name, spec in HARM.items()}


def searched(
    model: Path, output: Path, pipeline: str, repeats: int, clean: Mapping[str, float]
) -> dict[str, Any]:
    """One kind of harm."""
    seconds, done = best(model, output, pipeline, repeats)
    assert done.bisection is not None, f"{pipeline} is not found to be wrong"
    steps = {**seconds, "verify": clean["verify"]}
    verification = sum(steps[step] for step in VERIFICATION if step in steps)
    return {
        "bisect": round(seconds["bisect"], 2),
        "verification": round(verification, 2),
        "ratio": round(seconds["bisect"] / verification, 2),
        "runs": done.bisection.trials,
        "left_out": done.bisection.left_out,
        "sites": done.bisection.rewritten,
    }


def best(model: Path, output: Path, pipeline: str, repeats: int) -> tuple[dict[str, float], Export]:
    """The least seconds of each step."""
    runs = []
    for _ in range(repeats):
        steps = Steps()
        request = ExportRequest(str(model), output, pipeline=pipeline, threads=1, overwrite=True)
        done = export(request, steps)
        runs.append(steps.seconds)
    return {step: min(run[step] for run in runs) for step in runs[0]}, done


if __name__ == "__main__":
    main()
