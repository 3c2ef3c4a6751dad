"""Memory and time of an export of a large text encoder: T5 v1.1 XL (1.2 B) and XXL (4.7 B) shapes.

    python benchmarks/large.py xl|xxl [--precision bf16|fp16] [--stored bf16|fp16]
                               [--folder DIR] [--out FILE.json]

The weights are seeded random ones with outlier channels, written in shards as the published files
are: memory, time and node counts are those of the trained models, errors are not.  The export runs
in a process of its own, and its peak is taken twice: as the export reports it, and as the kernel
does for the child (what `/usr/bin/time -v` prints).
"""

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import T5Config, T5EncoderModel

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "numpy")
SIZES = {"small": (512, 1024, 6, 8), "xl": (2048, 5120, 32, 24), "xxl": (4096, 10240, 64, 24)}
"""Hidden size, feed-forward size, heads, layers (Raffel et al. 2020; t5x's v1.1 checkpoints)."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHARD = 5_000_000_000
"""Bytes of a shard, as transformers' `save_pretrained` cuts them."""
OUTLIERS, OUTLIER_SCALE = (5, 11), 12.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--stored", default="bf16", choices=DTYPES)
    parser.add_argument("--folder", type=Path, help="keeps the model between runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found_machine = machine()  # before the run: the commit that is measured
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        model = (options.folder or Path(scratch)) / f"t5-v1_1-{options.size}-{options.stored}"
        if not (model / "config.json").exists():
            write_model(model, *SIZES[options.size], DTYPES[options.stored])
        result = measure(model, Path(scratch) / "engine", options.precision)
    result["machine"] = found_machine
    name = f"large-{options.size}-{options.stored}-to-{options.precision}.json"
    out = options.out or RESULTS / name
    out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, sort_keys=True))
    print(out)


def measure(model: Path, bundle: Path, precision: str) -> dict[str, Any]:
    """Export in a child and read what the kernel counted for it."""
    command = [sys.executable, "-m", "enginecast", "export", str(model), "-o", str(bundle)]
    command += ["--precision", precision, "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout) if done.stdout else {}
    return {
        "exit_code": done.returncode,
        "outcome": found.get("outcome"),
        "engine": found.get("engine"),
        "worst_ratio": max(
            (o["ratio"] or math.inf for o in found.get("verdict", {}).get("outputs", [])),
            default=None,
        ),
        "nodes": found.get("nodes"),
        "model_bytes": sum(file.stat().st_size for file in model.glob("*.safetensors")),
        "bundle_bytes": found.get("size"),
        "memory": found.get("memory"),
        "seconds": {"wall": round(seconds, 1), "cpu": round(used.ru_utime + used.ru_stime, 1)},
        "steps": {name: round(spent, 1) for name, spent in found.get("seconds", {}).items()},
        "kernel_peak_bytes": used.ru_maxrss * 1024,
    }


def write_model(
    folder: Path, width: int, inner: int, heads: int, layers: int, dtype: torch.dtype
) -> None:
    """Write config.json, shards and their index, holding one shard in memory at a time."""
    config = T5Config(
        d_model=width,
        d_ff=inner,
        num_heads=heads,
        num_layers=layers,
        d_kv=64,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        architectures=["T5EncoderModel"],
        dtype=str(dtype).removeprefix("torch."),
    )
    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards(config, dtype), start=1):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    config.save_pretrained(folder)


def shards(config: T5Config, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Seeded weights with transformers' scales, about `SHARD` bytes at a time."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in T5EncoderModel(config).state_dict().items()}
    shapes.pop("encoder.embed_tokens.weight", None)  # tied to shared.weight
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        shard[name] = draw(name, shape, config, generator).to(dtype)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD:
            yield shard
            shard = {}
    if shard:
        yield shard


def draw(name: str, shape: torch.Size, config: T5Config, generator: torch.Generator) -> Tensor:
    """One weight: a norm around one with outlier channels, or a matrix of its usual scale."""
    if len(shape) == 1:
        norm = 1.0 + 0.1 * torch.randn(shape, generator=generator)
        norm[list(OUTLIERS)] *= OUTLIER_SCALE
        return norm
    scale = 1.0
    if name.endswith("q.weight"):
        scale = (config.d_model * config.d_kv) ** -0.5
    elif name != "shared.weight":
        scale = shape[-1] ** -0.5
    return torch.randn(shape, generator=generator) * scale


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "commit": commit,
        "versions": {name: version(name) for name in PACKAGES},
    }


if __name__ == "__main__":
    main()
