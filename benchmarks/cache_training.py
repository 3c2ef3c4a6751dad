"""Training with the text encoder, with a cache of its outputs, and with a file a text.

    python benchmarks/cache_training.py [--size base|small|tiny] [--texts N] [--steps N]
                                        [--out FILE.json]

An encoder of the shape of T5 v1.1 with seeded random weights, and made-up captions: weights and
words do not matter for time, memory and disk, lengths do.  For an encoder that gets a mask (as
PixArt-Sigma uses it: 300 tokens) and one that gets none (CogVideoX: 226 tokens), each way trains
the same small denoiser in a process of its own:

    live     the encoder runs in each step
    encoder  `CachedEncoder` in its place: tokenizer and call unchanged
    dataset  `as_dataset`: rows come with the texts
    pt       a .pt file a text: bfloat16, padding left out where there is a mask
    npz      an .npz file a text: float32, padded

The cache is filled by `enginecast cache fill` in bfloat16.  Besides: CPU time to read all texts
back in random order, 16 at a time, the file system's cache warm.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from cache_training_loop import Files
from large import RESULTS, machine
from transformers import T5Config, T5EncoderModel

from enginecast.cache.read.reader import open_cache
from enginecast.runtime.device.torch_values import as_tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from cache_fixtures import add_t5_tokenizer, captions

SIZES = {"tiny": (64, 128, 2, 2), "small": (512, 1024, 8, 6), "base": (768, 2048, 12, 12)}
"""Hidden size, feed-forward size, layers, heads (Raffel et al. 2020; t5x's v1.1 checkpoints)."""
WAYS = ("live", "encoder", "dataset", "pt", "npz")
READ_BATCH, READ_ROUNDS = 16, 5


@dataclass(frozen=True)
class Use:
    """How a pipeline uses the encoder."""

    pipeline: str
    length: int
    mask: bool
    texts: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--texts", type=int, default=128, help="a quarter where nothing is masked")
    parser.add_argument("--steps", type=int, default=20, help="a tenth with the encoder")
    parser.add_argument("--out", type=Path, default=RESULTS / "cache-training.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine() | {"threads": 1}}  # before the run
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        result["machine"]["gpu"] = torch.cuda.get_device_name()
    width, inner, layers, heads = SIZES[options.size]
    result["encoder"] = {"width": width, "inner": inner, "layers": layers, "heads": heads}
    uses = (
        Use("pixart-sigma", 300, True, options.texts),
        Use("cogvideox", 226, False, max(8, options.texts // 4)),
    )
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model", options.size)
        for use in uses:
            folder = Path(scratch) / use.pipeline
            folder.mkdir()
            result[use.pipeline] = compare(use, model, folder, options.steps, device)
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, sort_keys=True))
    print(options.out)


def write_model(folder: Path, size: str) -> Path:
    width, inner, layers, heads = SIZES[size]
    config = T5Config(
        d_model=width,
        d_kv=64,
        d_ff=inner,
        num_layers=layers,
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        architectures=["T5EncoderModel"],
    )
    torch.manual_seed(0)
    T5EncoderModel(config).save_pretrained(folder)
    return add_t5_tokenizer(folder)


def compare(use: Use, model: Path, folder: Path, steps: int, device: str) -> dict[str, Any]:
    texts = sorted({"", *captions(use.texts, seed=1)})  # a fill adds the empty text itself
    filled = fill(use, model, folder, texts)
    sizes = {"cache": size_of(folder / "cache")}
    for form in ("pt", "npz"):
        sizes[form] = write_files(folder / "cache", folder / form, form, texts, use)
    job = {
        "texts": texts,
        "model": str(model),
        "cache": str(folder / "cache"),
        "length": use.length,
        "mask": use.mask,
        "batch": 4,
        "width": open_cache(folder / "cache").spec.outputs[0].width,
        "device": device,
    }
    ways = {way: run(job | {"way": way, "files": str(folder / way)}, folder, steps) for way in WAYS}
    read = {form: read_time(form, folder, texts, use) for form in ("cache", "pt", "npz")}
    return {
        "texts": len(texts),
        "length": use.length,
        "mask": use.mask,
        "fill": filled,
        "training": ways,
        "disk_bytes_per_text": {form: round(size / len(texts)) for form, size in sizes.items()},
        "read_cpu_us_per_text": {form: round(1e6 * one, 1) for form, one in read.items()},
        "ratios": {
            "CPU of a step, live to encoder": _ratio(ways, "live", "encoder", "step_cpu_ms"),
            "CPU of a step, live to dataset": _ratio(ways, "live", "dataset", "step_cpu_ms"),
            "memory, live to encoder": _ratio(ways, "live", "encoder", "peak_mb"),
            "disk, cache to npz": round(sizes["cache"] / sizes["npz"], 3),
            "disk, cache to pt": round(sizes["cache"] / sizes["pt"], 3),
            "read, pt to cache": round(read["pt"] / read["cache"], 2),
            "read, npz to cache": round(read["npz"] / read["cache"], 2),
        },
    }


def _ratio(ways: dict[str, dict[str, float]], one: str, other: str, what: str) -> float:
    return round(ways[one][what] / ways[other][what], 2)


def fill(use: Use, model: Path, folder: Path, texts: list[str]) -> dict[str, Any]:
    """Run `enginecast cache fill`; what it says, and how long the process took."""
    lines = folder / "texts.txt"
    lines.write_text("\n".join(texts), encoding="utf-8")
    command = [sys.executable, "-m", "enginecast", "cache", "fill", str(model)]
    command += ["--texts", str(lines), "-o", str(folder / "cache"), "--for", use.pipeline]
    command += ["--clean", "none", "--store-dtype", "bfloat16", "--batch-tokens", "2048"]
    command += ["--too-long", "truncate", "--json", "--quiet"]
    begun = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - begun
    found = json.loads(done.stdout)
    return {"process_seconds": round(seconds, 1)} | {
        name: found[name] for name in ("seconds", "tokens", "stored") if name in found
    }


def write_files(cache: Path, folder: Path, form: str, texts: list[str], use: Use) -> int:
    """Write a file a text as trainers do; returns what they take on disk."""
    folder.mkdir()
    entries = open_cache(cache).get_many(texts)
    for number, entry in enumerate(entries):
        rows = as_tensor(entry.outputs["last_hidden_state"]).clone()
        path = folder / f"{number}.{form}"
        if form == "pt":
            torch.save({"rows": rows, "mask": torch.ones(len(rows), dtype=torch.bool)}, path)
            continue
        padded = np.zeros((use.length, rows.shape[1]), np.float32)
        padded[: len(rows)] = rows.float().numpy()
        np.savez(path, rows=padded, mask=np.arange(use.length) < len(rows))
    return size_of(folder)


def size_of(folder: Path) -> int:
    """Bytes on disk, in whole blocks as `du` counts them."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def run(job: dict[str, Any], folder: Path, steps: int) -> dict[str, float]:
    """Train in a fresh process; medians leave out the first step, which sets things up."""
    given = folder / "job.json"
    count = max(4, steps // 10) if job["way"] == "live" else steps
    given.write_text(json.dumps(job | {"steps": count}), encoding="utf-8")
    program = Path(__file__).with_name("cache_training_loop.py")
    done = subprocess.run(
        [sys.executable, str(program), str(given)], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    row = {
        "step_ms": round(1e3 * median(found["steps"][1:]), 2),
        "step_cpu_ms": round(1e3 * median(found["cpu"][1:]), 2),
        "of_it_text_ms": round(1e3 * median(found["waits"][1:]), 2),
        "peak_mb": round(found["peak"] / 1e6),
        "before_text_mb": round(found["before"] / 1e6),
    }
    if "cuda_peak" in found:
        row["cuda_peak_mb"] = round(found["cuda_peak"] / 1e6)
    return row


def read_time(form: str, folder: Path, texts: list[str], use: Use) -> float:
    """CPU seconds a text, to tensors; the best of some rounds."""
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    batches = [order[start : start + READ_BATCH] for start in range(0, len(order), READ_BATCH)]
    read = _reader(form, folder, texts, use)
    best = float("inf")
    for _ in range(READ_ROUNDS):
        begun = time.process_time()
        for batch in batches:
            read(batch)
        best = min(best, time.process_time() - begun)
    return best / len(texts)


def _reader(form: str, folder: Path, texts: list[str], use: Use) -> Callable[[list[int]], Any]:
    """Gives a padded batch [batch, length, width] of some texts."""
    if form == "cache":
        from enginecast.cache.read.datasets import as_dataset, collate

        cache = open_cache(folder / "cache")
        dataset, pad = as_dataset(cache, texts), collate(cache.spec, use.length)
        return lambda batch: pad(dataset.__getitems__(batch))["last_hidden_state"]
    files = Files(folder / form, form, len(texts), use.length)
    return lambda batch: torch.stack([files[index][0] for index in batch])


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    torch.set_num_threads(1)
    main()
