"""What an export costs, in CPU seconds, by the number of layers, beside plain torch.onnx.

    python benchmarks/export_cost.py [--layers 4 12 24] [--precision fp32] [--out FILE.json]
    python benchmarks/export_cost.py --models [vit-512 unet t5-base t5-base-int8] [--profile]

T5 v1.1-base shapes with seeded random weights.  `--models` takes ViT-B at 512x512, a UNet of 1.1
million parameters and T5-base instead, and has the CPU seconds of each step; with `--profile`, the
functions that take most of them.  Each export is a process of its own, imports included, the making
of the model's folder not; CPU seconds are user and system time of all its threads.  enginecast's
include the verification against eager; torch.onnx verifies nothing, and fails on weights that
require gradients, so its model is set up without them.
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
from machine import RESULTS, machine
from transformers import (
    AutoModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

HERE = Path(__file__).parent

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

STEPS = """
import cProfile, json, pstats, sys, time
started = time.process_time()
from contextlib import contextmanager
from enginecast import compile
from enginecast.compiler.steps import Steps
from enginecast.errors import VerificationError

class CpuSteps(Steps):
    cpu = {}

    @contextmanager
    def __call__(self, name):
        before = time.process_time()
        with super().__call__(name):
            yield
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - before

made, out, precision, profiled = sys.argv[1:]
sys.path[:0] = [TESTS, BENCHMARKS]
from export_cost import MODELS
model, example = MODELS[made](out)
steps, profile = CpuSteps(), cProfile.Profile()
loaded = time.process_time() - started
if profiled:
    profile.enable()
try:
    compile(model, out + "/bundle", example=example, precision=precision, steps=steps)
    outcome = "published"
except VerificationError as error:
    outcome = str(error)
profile.disable()
if profiled:
    pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(60)
print(json.dumps([outcome, {"imports": loaded, **steps.cpu}]))
"""
MAKE = """
import sys
sys.path[:0] = [TESTS, BENCHMARKS]
from export_cost import MODELS
made, out = sys.argv[1:]
MODELS[made](out)
"""
PLAIN_MODEL = """
import sys, torch
sys.path[:0] = [TESTS, BENCHMARKS]
from export_cost import MODELS, opened
made, out = sys.argv[1:]
model, example = opened(*MODELS[made](out))
batch = {name: {0: torch.export.Dim.AUTO} for name in example}
torch.onnx.export(
    model, (), out + "/plain.onnx", kwargs=example, dynamo=True, dynamic_shapes=batch,
    external_data=True, verbose=False,
)
"""


def vit(folder: str) -> tuple[Any, None]:
    """ViT-B for pictures of 512x512."""
    if not Path(folder, "model").exists():
        torch.manual_seed(0)
        ViTModel(ViTConfig(image_size=512)).save_pretrained(f"{folder}/model")
    return f"{folder}/model", None


def segformer(folder: str) -> tuple[Any, None]:
    """Segformer-B0 for pictures of 512x512."""
    if not Path(folder, "model").exists():
        torch.manual_seed(0)
        config = SegformerConfig(image_size=512)
        SegformerForSemanticSegmentation(config).save_pretrained(f"{folder}/model")
    return f"{folder}/model", None


def unet(folder: str) -> tuple[Any, dict[str, Any]]:
    """A UNet of 1.1 million parameters."""
    from small_unet import UNet

    torch.manual_seed(0)
    example = {
        "sample": torch.randn(2, 4, 32, 32),
        "timestep": torch.tensor([10, 500]),
        "text": torch.randn(2, 16, 24),
    }
    return UNet(width=WIDTH).eval(), example


def t5(folder: str) -> tuple[Any, None]:
    """The encoder of T5-base."""
    if not Path(folder, "model").exists():
        torch.manual_seed(0)
        config = T5Config(d_model=768, d_ff=3072, num_heads=12, num_layers=12)
        T5EncoderModel(config).save_pretrained(f"{folder}/model")
    return f"{folder}/model", None


MODELS = {
    "vit-512": vit,
    "segformer-b0-512": segformer,
    "unet": unet,
    "t5-base": t5,
    "t5-base-int8": t5,
}
WIDTH = 88


def opened(model: Any, example: Any) -> tuple[Any, dict[str, Any]]:
    """The module of a folder, with an example of its inputs."""
    if example is not None:
        return model.requires_grad_(False), example
    module = AutoModel.from_pretrained(model).eval().requires_grad_(False)
    if module.config.model_type == "t5":
        module = T5EncoderModel.from_pretrained(model).eval().requires_grad_(False)
        ids = torch.randint(0, 32000, (3, 7))
        return module, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return module, {"pixel_values": torch.randn(2, 3, 512, 512)}


def steps_of(name: str, profiled: bool) -> dict[str, Any]:
    """Export one model both ways, and count what each step of ours takes."""
    places = f"TESTS, BENCHMARKS = {str(HERE.parent / 'tests' / 'support')!r}, {str(HERE)!r}\n"
    precision = "int8" if name.endswith("int8") else "fp32"
    with tempfile.TemporaryDirectory() as scratch:
        cpu_seconds(["-c", places + MAKE, name, scratch])
        more = [name, scratch, precision, "1" if profiled else ""]
        ours, printed = cpu_seconds(["-c", places + STEPS, *more])
        plain, _ = cpu_seconds(["-c", places + PLAIN_MODEL, name, scratch])
    outcome, steps = json.loads(printed.splitlines()[-1])
    return {
        "enginecast": round(ours, 1),
        "outcome": outcome,
        "torch.onnx": round(plain, 1),
        "ratio": round(ours / plain, 2),
        "steps_cpu": {step: round(spent, 1) for step, spent in steps.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 24])
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--out", type=Path, default=RESULTS / "export-cost.json")
    parser.add_argument("--models", nargs="*", choices=MODELS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    found_machine = machine()  # before the run: the commit that is measured
    if options.models is not None:
        found = {name: steps_of(name, options.profile) for name in options.models or MODELS}
        kept = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        result = {**kept, "models": {**kept.get("models", {}), **found}, "machine": found_machine}
        options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", "utf-8")
        print(json.dumps(found, indent=1, sort_keys=True))
        return
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
    # Idle OpenMP threads sleep, as the command sets it.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
    return spent, done.stdout


if __name__ == "__main__":
    main()
