"""What emulated arithmetic costs: its time over that of plain eager fp32, on one thread.

    python benchmarks/emulation.py [--rounds N] [--out FILE.json]

A T5 v1.1-small-shaped encoder with seeded random weights, 4 prompts of 128 tokens, the program of
the fp16 and of the bf16 preset, in every profile.  Rounds are interleaved and medians are taken;
the result goes to benchmarks/results/ with versions, machine and commit.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from large import RESULTS, machine
from torch import Tensor
from torch.export import Dim, ExportedProgram
from transformers import T5Config, T5EncoderModel

from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.interpret import interpret
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.presets import preset
from enginecast.passes.registry import build
from enginecast.verification.emulate.emulate import emulate
from enginecast.verification.emulate.profiles import PROFILES, Profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "emulation.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found_machine = machine()  # before the run: the commit that is measured
    model, inputs = t5()
    captured = capture(model, inputs)
    rows = {
        precision: ratios(model, captured, inputs, precision, options.rounds)
        for precision in ("fp16", "bf16")
    }
    result = {"rows": rows, "unit": "times of eager fp32, one thread", "machine": found_machine}
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1, sort_keys=True))
    print(options.out)


def t5() -> tuple[T5EncoderModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = T5Config(
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    model = T5EncoderModel(config).eval().requires_grad_(False)
    ids = torch.randint(0, 32000, (4, 128))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def capture(model: T5EncoderModel, inputs: dict[str, Tensor]) -> ExportedProgram:
    dims = {0: Dim("batch", min=1, max=64), 1: Dim("sequence", max=512)}
    with torch.no_grad():
        return torch.export.export(
            model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, dims), strict=False
        )


def ratios(
    model: T5EncoderModel,
    captured: ExportedProgram,
    inputs: dict[str, Tensor],
    precision: str,
    rounds: int,
) -> dict[str, Any]:
    """Time of each profile, and of torch's own halves, over eager's."""
    program = structural_copy(captured)
    run_pipeline(build(preset(precision)), program, PassContext(calibration=(inputs,)))

    def emulated(profile: Profile) -> Callable[[], object]:
        return lambda: emulate(program, {"one": inputs}, profile)

    def eager() -> object:
        with torch.no_grad():
            return model(**inputs)

    runs: dict[str, Callable[[], object]] = {
        "eager fp32": eager,
        f"torch's own {precision}": lambda: interpret(program, inputs),
        **{name: emulated(profile) for name, profile in PROFILES.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    base = median(times.pop("eager fp32"))
    return {name: round(median(spent) / base, 2) for name, spent in times.items()}


if __name__ == "__main__":
    main()
