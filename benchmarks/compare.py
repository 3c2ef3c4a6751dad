"""Engines beside their peers, in one run: eager, plain torch.onnx on ONNX Runtime, enginecast.

    python benchmarks/compare.py [--device cpu|cuda] [--threads N] [--rounds N] [--out FILE.json]

Models have real shapes and seeded random weights: timings and node counts are those of trained
models, errors are not. Times are medians of interleaved rounds whose order turns around every other
round; what is reported is ratios.  The result goes to benchmarks/results/ with versions, machine
and commit.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

from enginecast import compile as compile_model
from enginecast import load
from enginecast.capture.inputs.derive.from_facts import from_facts
from enginecast.capture.inputs.derive.model_facts import ModelFacts
from enginecast.capture.inputs.examples import sample
from enginecast.runtime.bundle.manifest import Manifest

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "numpy")


def models() -> dict[str, tuple[PreTrainedModel, dict[str, int]]]:
    """Model by name, with the sizes it is timed at."""
    torch.manual_seed(0)
    t5 = T5Config(
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    bert = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12)
    bert.intermediate_size = 1536
    vit = ViTConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6)
    vit.intermediate_size = 1536
    return {
        "t5-v1.1-small 4x128": (T5EncoderModel(t5), {"batch": 4, "sequence": 128}),
        "bert-minilm 8x64": (BertModel(bert), {"batch": 8, "sequence": 64}),
        "vit-6x384 2x224x224": (ViTModel(vit), {"batch": 2}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = {name: compare(*model, options) for name, model in models().items()}
    result = {"rows": rows, "machine": machine(options), "unit": "times of eager fp32 over each"}
    RESULTS.mkdir(exist_ok=True)
    out = options.out or RESULTS / f"compare-{options.device}.json"
    out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1, sort_keys=True))
    print(out)


def compare(
    model: PreTrainedModel, sizes: Mapping[str, int], options: argparse.Namespace
) -> dict[str, Any]:
    """Export one model both ways, then time the three in turns."""
    model = model.eval().requires_grad_(False)
    specs = from_facts(ModelFacts(model.config, _takes(model)))
    inputs = sample(specs, sizes, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        seconds: dict[str, float] = {}
        plain = timed("torch.onnx", seconds, lambda: plain_session(model, inputs, folder, options))
        bundle = timed("enginecast", seconds, lambda: export_ours(model, inputs, folder, options))
        with load(bundle, device=options.device, threads=options.threads) as engine:
            feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
            on_device = {name: t.to(options.device) for name, t in inputs.items()}
            placed = model.to(options.device)  # type: ignore[arg-type]
            runs: dict[str, Callable[[], object]] = {
                "eager": lambda: _eager(placed, on_device),
                "torch.onnx": lambda: plain.run(None, feeds),
                "enginecast": lambda: engine.run(feeds),
            }
            times = interleaved(runs, options.rounds)
            return {
                "speed": {name: round(times["eager"] / spent, 3) for name, spent in times.items()},
                "nodes": {"torch.onnx": _nodes(folder), "enginecast": _engine_nodes(bundle)},
                "export_seconds": {name: round(s, 1) for name, s in seconds.items()},
                "error_in_floors": _ratio(engine.manifest),
            }


def _takes(model: PreTrainedModel) -> tuple[str, ...]:
    return ("pixel_values",) if isinstance(model, ViTModel) else ("input_ids", "attention_mask")


def timed(name: str, seconds: dict[str, float], work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    found = work()
    seconds[name] = time.perf_counter() - start
    return found


def plain_session(
    model: nn.Module, inputs: Mapping[str, Tensor], folder: str, options: argparse.Namespace
) -> onnxruntime.InferenceSession:
    """What a user gets from torch.onnx alone: dynamic batch and sequence, opset with fused ops."""
    dynamic = {
        name: {d: torch.export.Dim.DYNAMIC for d in range(2 if tensor.ndim == 2 else 1)}
        for name, tensor in inputs.items()
    }
    path = Path(folder) / "plain.onnx"
    with torch.no_grad():
        torch.onnx.export(
            model,
            (),
            path,
            kwargs=dict(inputs),
            dynamic_shapes=dynamic,
            dynamo=True,
            opset_version=23,
            verbose=False,
        )
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.log_severity_level = 4
    provider = "CPUExecutionProvider" if options.device == "cpu" else "CUDAExecutionProvider"
    return onnxruntime.InferenceSession(path, settings, providers=[provider])


def export_ours(
    model: nn.Module, inputs: Mapping[str, Tensor], folder: str, options: argparse.Namespace
) -> Path:
    bundle = Path(folder) / "bundle"
    device = None if options.device == "cpu" else options.device
    compile_model(model, bundle, example=dict(inputs), device=device, threads=options.threads)
    return bundle


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taken in turns; the first two rounds warm up."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 2):
        order = list(runs) if index % 2 else list(reversed(runs))
        for name in order:
            start = time.perf_counter()
            runs[name]()
            spent[name].append(time.perf_counter() - start)
    return {name: median(values[2:]) for name, values in spent.items()}


def _eager(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        model(**inputs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _nodes(folder: str) -> int:
    import onnx

    return len(onnx.load(Path(folder) / "plain.onnx", load_external_data=False).graph.node)


def _engine_nodes(bundle: Path) -> int:
    import onnx

    return len(onnx.load(bundle / "engine.onnx", load_external_data=False).graph.node)


def _ratio(manifest: Manifest) -> float:
    outputs = manifest.engines[0].verdict.outputs
    return round(max(o.ratio for o in outputs if o.ratio is not None), 2)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader needs to read the figures."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "threads": options.threads,
        "commit": commit.stdout.strip(),
        "versions": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
