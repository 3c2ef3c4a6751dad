"""What a transformer of equal blocks costs to export, in CPU seconds, by the number of blocks.

    python benchmarks/repeated_blocks.py [--blocks 4 12 40] [--kinds regional ...] [--out FILE.json]
    python benchmarks/repeated_blocks.py --speed 15 --blocks 4

A Flux of small width, half of its blocks double and half single, with seeded random weights, in
fp32 for a batch that varies.  `onnxruntime-fp16` is judged by emulation, too; `onnxruntime-int8`
and `onnxruntime-fp8` are planned.  `aotinductor` compiles it as one, `regional` one block of each
kind, and `regional-fp16` so in fp16.
Each export is a process of its own; CPU seconds are user and system time of all its threads and of
the compilers that it calls, verification included.
`--speed` runs the engine of `regional` and that of `aotinductor` in turns instead, so many rounds
on one thread, in one process.
"""

import argparse
import json
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from export_cost import cpu_seconds
from large import RESULTS, machine

from enginecast import compile, load
from enginecast.bench.timing import interleaved
from enginecast.compiler.steps import Steps
from enginecast.errors import VerificationError
from enginecast.exporters.aotinductor.options import AOTInductorOptions

KINDS: dict[str, dict[str, Any]] = {
    "onnxruntime": {},
    "onnxruntime-fp16": {"precision": "fp16"},
    "onnxruntime-int8": {"precision": "int8"},
    "onnxruntime-fp8": {"precision": "fp8"},
    "aotinductor": {"target": "aotinductor"},
    "regional": {"target": "aotinductor", "target_options": AOTInductorOptions(regional=True)},
    "regional-fp16": {
        "target": "aotinductor",
        "precision": "fp16",
        "target_options": AOTInductorOptions(regional=True),
    },
}
WHOLE = "whole export"
SIDE, TEXT = 8, 12
"""Of the picture, in patches, and of the text, in tokens."""


def flux(blocks: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A transformer with so many blocks, and an example of its inputs."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=blocks // 2,
        num_single_layers=blocks - blocks // 2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
        guidance_embeds=True,
    )
    places = torch.zeros(SIDE * SIDE, 3)
    places[:, 1:] = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
    return model.eval(), {
        "hidden_states": torch.randn(2, SIDE * SIDE, 16),
        "encoder_hidden_states": torch.randn(2, TEXT, 64),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, 3),
        "guidance": torch.tensor([3.5, 3.5]),
    }


class CpuSteps(Steps):
    """Counts CPU seconds, those of ended children included."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before = _spent()
        with super().__call__(name):
            yield
        self.cpu[name] = self.cpu.get(name, 0.0) + _spent() - before


def _spent() -> float:
    counted = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in counted)


def export(kind: str, blocks: int) -> None:
    """Export once in this process, and print the outcome and the CPU seconds of each step."""
    model, example = flux(blocks)
    steps = CpuSteps()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            bundle = compile(
                model, Path(scratch) / "engine", example=example, steps=steps, **KINDS[kind]
            )
            engine = bundle.manifest.engines[0]
            outcome, regions = engine.verdict.outcome, engine.regions
        except VerificationError as error:
            outcome, regions = str(error), {}
    print(json.dumps({"outcome": outcome, "regions": regions, "steps": steps.cpu}))


def speed(blocks: int, rounds: int) -> dict[str, Any]:
    """How fast the engine with pieces is beside the whole one."""
    model, example = flux(blocks)
    feeds = {name: tensor.numpy() for name, tensor in example.items()}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        engines = {}
        for kind in ("aotinductor", "regional"):
            bundle = compile(model, Path(scratch) / kind, example=example, **KINDS[kind])
            loaded = load(bundle.root, allow_code=True, threads=1)
            engines[kind] = stack.enter_context(loaded)
        calls = {kind: partial(engine.run, feeds) for kind, engine in engines.items()}
        times = interleaved(calls, rounds=rounds)
    faster = times["regional"].over(times["aotinductor"])
    low, high = quantiles(faster.cpu, n=4, method="inclusive")[::2]
    return {
        "cpu milliseconds": {kind: round(each.median_cpu, 2) for kind, each in times.items()},
        "regional is faster, CPU": round(faster.median_cpu, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 12, 40])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--speed", type=int, metavar="ROUNDS")
    parser.add_argument("--out", type=Path, default=RESULTS / "repeated-blocks.json")
    parser.add_argument("--here", nargs=2, metavar=("KIND", "BLOCKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        export(options.here[0], int(options.here[1]))
        return
    found_machine = machine()  # before the run: the commit that is measured
    made = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {"rows": {}}
    if options.speed:
        for blocks in options.blocks:
            row = {**speed(blocks, options.speed), "machine": found_machine}
            made.setdefault("speed", {})[str(blocks)] = row
            _write(options.out, made)
        return
    rows, made["machine"] = made["rows"], found_machine
    for blocks in options.blocks:
        for kind in options.kinds:
            spent, printed = cpu_seconds([__file__, "--here", kind, str(blocks)])
            found = json.loads(printed.splitlines()[-1])
            steps = {name: round(seconds, 1) for name, seconds in found["steps"].items()}
            row = {"outcome": found["outcome"], WHOLE: round(spent, 1), **steps}
            row["commit"] = found_machine["commit"]
            if found["regions"]:
                row["modules by region"] = found["regions"]
            rows.setdefault(str(blocks), {})[kind] = row
            print(blocks, kind, json.dumps(row), file=sys.stderr)
            _write(options.out, made)
    print(options.out)


def _write(file: Path, made: dict[str, Any]) -> None:
    file.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
