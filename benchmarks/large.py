"""Memory and time of an export of a large model: T5 encoders of XL (1.2 B) and XXL (4.7 B) shapes,
diffusion transformers of Flux's and Wan's shapes with 0.2 to 5 B weights.

    python benchmarks/large.py SHAPE [--precision fp32|bf16|fp16] [--stored bf16|fp16]
                               [--folder DIR] [--out FILE.json]

The weights are seeded random ones, those of T5 with outlier channels, written in shards as the
published files are: memory, time and node counts are those of the trained models, errors are not.
The export runs in a process of its own, and its peak is taken twice: as the export reports it, and
as the kernel does for the child (what `/usr/bin/time -v` prints).
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import T5Config, T5EncoderModel

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "diffusers", "onnx", "onnxscript", "onnxruntime", "numpy")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHARD = 5_000_000_000
"""Bytes of a shard, as transformers' `save_pretrained` cuts them."""
OUTLIERS, OUTLIER_SCALE = (5, 11), 12.0


@dataclass(frozen=True)
class Shape:
    """A model without weights, and how its folder is exported."""

    kind: Literal["t5", "FluxTransformer2DModel", "WanTransformer3DModel"]
    settings: Mapping[str, Any]
    options: tuple[str, ...] = ()
    """Of `export`: the sizes of the example."""

    @property
    def stem(self) -> str:
        """What the files of the weights are called."""
        return "model" if self.kind == "t5" else "diffusion_pytorch_model"

    def config(self, dtype: torch.dtype) -> T5Config:
        """Of a T5 encoder."""
        name = str(dtype).removeprefix("torch.")
        common = {"d_kv": 64, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        classes = {"architectures": ["T5EncoderModel"], "dtype": name}
        return T5Config(**self.settings, **common, **classes)

    def empty(self, dtype: torch.dtype) -> Any:
        """The model, on the meta device."""
        with torch.device("meta"):
            if self.kind == "t5":
                return T5EncoderModel(self.config(dtype))
            return getattr(diffusers, self.kind)(**self.settings)


def t5(width: int, inner: int, heads: int, layers: int) -> Shape:
    """Raffel et al. 2020; t5x's v1.1 checkpoints."""
    sizes = {"d_model": width, "d_ff": inner, "num_heads": heads, "num_layers": layers}
    return Shape("t5", sizes)


def flux(heads: int, double: int, single: int) -> Shape:
    """FLUX.1 has 24 heads, 19 double blocks and 38 single ones."""
    sizes = {"num_attention_heads": heads, "num_layers": double, "num_single_layers": single}
    small = ("--height", "64", "--width", "64")
    return Shape("FluxTransformer2DModel", {**sizes, "guidance_embeds": True}, small)


def wan(heads: int, inner: int, layers: int) -> Shape:
    """Wan 2.2 TI2V-5B has 24 heads, 14336 and 30 layers."""
    sizes = {"num_attention_heads": heads, "ffn_dim": inner, "num_layers": layers}
    channels = {"in_channels": 48, "out_channels": 48}
    small = ("--height", "64", "--width", "64", "--frames", "5")
    return Shape("WanTransformer3DModel", {**sizes, **channels}, small)


SHAPES = {
    "small": t5(512, 1024, 6, 8),
    "xl": t5(2048, 5120, 32, 24),
    "xxl": t5(4096, 10240, 64, 24),
    "flux-200m": flux(8, 3, 6),
    "flux-800m": flux(16, 3, 6),
    "flux-2b": flux(24, 3, 7),
    "flux-5b": flux(24, 8, 16),
    "wan-200m": wan(8, 4096, 10),
    "wan-2b": wan(24, 14336, 12),
    "wan-5b": wan(24, 14336, 30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--stored", default="bf16", choices=DTYPES)
    parser.add_argument("--folder", type=Path, help="keeps the model between runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found_machine = machine()  # before the run: the commit that is measured
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        model = (options.folder or Path(scratch)) / f"{options.shape}-{options.stored}"
        shape = SHAPES[options.shape]
        if not (model / "config.json").exists():
            write_model(model, shape, DTYPES[options.stored])
        result = measure(model, Path(scratch) / "engine", options.precision, shape.options)
    result["machine"] = found_machine
    name = f"large-{options.shape}-{options.stored}-to-{options.precision}.json"
    out = options.out or RESULTS / name
    out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, sort_keys=True))
    print(out)


def measure(
    model: Path, bundle: Path, precision: str, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Export in a child and read what the kernel counted for it."""
    command = [sys.executable, "-m", "enginecast", "export", str(model), "-o", str(bundle)]
    command += ["--precision", precision, "--json", *options]
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


def write_model(folder: Path, shape: Shape, dtype: torch.dtype) -> None:
    """Write config.json, shards and their index, holding one shard in memory at a time."""
    folder.mkdir(parents=True)
    empty = shape.empty(dtype)
    shapes = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    shapes.pop("encoder.embed_tokens.weight", None)  # tied to shared.weight
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards(shapes, shape, dtype), start=1):
        name = f"{shape.stem}-{number:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / f"{shape.stem}.safetensors.index.json").write_text(text, encoding="utf-8")
    if shape.kind == "t5":
        shape.config(dtype).save_pretrained(folder)
    else:
        empty.save_config(folder)


def shards(
    shapes: Mapping[str, torch.Size], shape: Shape, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Seeded weights with the scales of fresh ones, about `SHARD` bytes at a time."""
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, Tensor] = {}
    for name, size in shapes.items():
        make = draw if shape.kind == "t5" else draw_of_diffusion
        shard[name] = make(name, size, shape, generator).to(dtype)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD:
            yield shard
            shard = {}
    if shard:
        yield shard


def draw_of_diffusion(name: str, size: torch.Size, _: Shape, generator: torch.Generator) -> Tensor:
    """One weight: a norm around one, a small bias, or a matrix of its usual scale; a tenth of that
    where the time step goes, as it is small in trained models: 16 bits hold few of its digits.
    """
    noise = torch.randn(size, generator=generator)
    if len(size) == 1:
        return 0.02 * noise if name.endswith("bias") else 1.0 + 0.1 * noise
    scale = 0.1 if "norm" in name or "time" in name else 1.0
    return noise * scale * math.prod(size[1:]) ** -0.5


def draw(name: str, size: torch.Size, shape: Shape, generator: torch.Generator) -> Tensor:
    """One weight: a norm around one with outlier channels, or a matrix of its usual scale."""
    if len(size) == 1:
        norm = 1.0 + 0.1 * torch.randn(size, generator=generator)
        norm[list(OUTLIERS)] *= OUTLIER_SCALE
        return norm
    scale = 1.0
    if name.endswith("q.weight"):
        scale = (shape.settings["d_model"] * 64) ** -0.5
    elif name != "shared.weight":
        scale = size[-1] ** -0.5
    return torch.randn(size, generator=generator) * scale


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
