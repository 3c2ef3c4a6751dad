"""What a call of an engine costs beside ONNX Runtime's own `run` of its file, in microseconds.

    python benchmarks/call_overhead.py [--rounds N] [--out FILE.json]

A linear, a block of a tiny CogVideoX and the decoder of a small AutoencoderKL, one thread; rounds
of calls of both in turns.  The result, with versions, machine and commit, goes to
benchmarks/results/call-overhead.json.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from diffusers import AutoencoderKL
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
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


class Decoder(nn.Module):
    """From latents [B, 4, 32, 32] to images [B, 3, 128, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = AutoencoderKL(
            block_out_channels=(32, 64, 64),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            norm_num_groups=8,
        )

    def forward(self, latents: Tensor) -> Tensor:
        found: Tensor = self.vae.decode(latents, return_dict=False)[0]
        return found


def cases() -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """Models with their inputs."""
    block = CogVideoXBlock(32, 2, 16, 32)
    states = {
        "hidden_states": torch.randn(2, 24, 32),
        "encoder_hidden_states": torch.randn(2, 7, 32),
    }
    return {
        "linear": (Small(), {"x": torch.randn(3, 64), "state": torch.randn(3, 64)}),
        "CogVideoX block": (block, {**states, "temb": torch.randn(2, 32)}),
        "AutoencoderKL decoder": (Decoder(), {"latents": torch.randn(2, 4, 32, 32)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "call-overhead.json")
    options = parser.parse_args()
    found_machine = machine()  # before the run: the commit that is measured
    torch.manual_seed(0)
    rows = {name: row(*case, options.rounds) for name, case in cases().items()}
    result = {"rows": rows, "rounds": options.rounds, "machine": found_machine}
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, sort_keys=True))


def row(module: nn.Module, example: dict[str, Tensor], rounds: int) -> dict[str, Any]:
    """Medians of one model, both ways."""
    feeds = {name: tensor.numpy() for name, tensor in example.items()}
    with tempfile.TemporaryDirectory() as folder:
        bundle = enginecast.compile(module.eval(), f"{folder}/bundle", example=example)
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
            times = interleaved(calls, rounds=rounds)
    samples = {name: [1e3 * each for each in found.wall] for name, found in times.items()}
    more = [
        one - other for one, other in zip(samples["engine"], samples["onnxruntime"], strict=True)
    ]
    return {
        "microseconds": {name: round(median(found), 1) for name, found in samples.items()},
        "more": {"median": round(median(more), 1), "least": round(min(more), 1)},
    }


if __name__ == "__main__":
    main()
