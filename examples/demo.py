"""`make demo`: a text encoder with outliers, from a model folder to verified engines.

Makes a T5 v1.1-small-shaped encoder (its real config, seeded weights) and a small tokenizer in
`demo/`, exports it in fp32, bf16, fp16 and int8, and in fp16 by a mere conversion, which is
refused; prints the verdicts, and runs prompts through the engine in a process that has no torch.

Random weights do not behave like trained ones.  Trained T5 encoders drive a few channels of the
residual stream past fp16's largest value at the end-of-text token (huggingface/transformers#10956);
`plant_outlier` gives these weights that property, and nothing else here should be taken for the
accuracy of a trained model.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import T5Config, T5EncoderModel
from transformers.utils import logging as transformers_logging

from enginecast.bench.export import export_timing
from enginecast.compiler.export.session import export
from enginecast.compiler.publication.bundle import Export
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.passes.presets import preset
from enginecast.verification.metrics import times

ROOT = Path("demo")
MODEL = ROOT / "t5-small-outliers"
PROMPTS = ROOT / "prompts.txt"
TEXTS = (
    "a photograph of an astronaut riding a horse on the moon",
    "",
    "rain",
    "two cats sleep on a red sofa while it rains outside the window",
    "an oil painting of a lighthouse at night, a storm rising, waves against the rocks",
)
EOS, HIDDEN_UNIT, OUTLIER_BLOCK = 1, 7, 2
TRIGGER, OUTLIER_CHANNELS = 11, (3, 200)
PRECISIONS = ("fp32", "bf16", "fp16", "int8")
NAIVE = preset("fp16").removeprefix("rescale-streams,")
"""The pipeline of fp16 without the pass that keeps the stream in range: a mere conversion."""


def main() -> None:
    """Make the model, export it five times, print the table, run prompts."""
    transformers_logging.disable_progress_bar()
    console = Console(width=None if Console().is_terminal else 120)
    if ROOT.exists() and not MODEL.exists():
        sys.exit(f"{ROOT} is here already, and not of this demo: run it in another folder")
    shutil.rmtree(ROOT, ignore_errors=True)
    MODEL.mkdir(parents=True)
    PROMPTS.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    make_model(MODEL)
    make_tokenizer(MODEL)
    rows = [export_one(precision, console) for precision in PRECISIONS]
    rows.append(export_one("fp16", console, pipeline=NAIVE))
    print_table(rows, console)
    run_without_torch(console)


def make_model(folder: Path) -> None:
    """Save a T5 v1.1-small-shaped encoder: 8 layers, width 512, gated GELU, 35 M parameters."""
    config = T5Config(
        vocab_size=32128,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        architectures=["T5EncoderModel"],
    )
    torch.manual_seed(0)
    model = T5EncoderModel(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    plant_outlier(model)
    model.save_pretrained(folder)


def plant_outlier(model: nn.Module) -> None:
    """Let one hidden unit fire on the end-of-text token and write 1.4e5 to two channels of the
    stream.
    """
    state = dict(model.named_parameters())
    embedding = state["shared.weight"]
    embedding[:, TRIGGER] = 0.0
    embedding[EOS, TRIGGER] = 40.0
    block = f"encoder.block.{OUTLIER_BLOCK}.layer.1."
    state[block + "layer_norm.weight"][TRIGGER] = 1.0
    hidden = block + "DenseReluDense."
    for name in ("wi_0", "wi_1"):
        state[f"{hidden}{name}.weight"][HIDDEN_UNIT, TRIGGER] = 8.0
    for channel in OUTLIER_CHANNELS:
        state[f"{hidden}wo.weight"][channel, HIDDEN_UNIT] = 7.0


def make_tokenizer(folder: Path) -> None:
    """Train a small tokenizer on the demo's own prompts; every text ends with </s>, as T5's do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    precision: str
    done: Export


def export_one(precision: str, console: Console, *, pipeline: str | None = None) -> Row:
    """Export as `enginecast export MODEL -o DIR --precision P --prompts F` does.

    Args:
        pipeline: instead of the precision's preset, as `--pipeline` says.
    """
    name = precision if pipeline is None else f"{precision}-naive"
    chosen = "" if pipeline is None else f" --pipeline '{pipeline}'"
    said = f"enginecast export {MODEL} -o {ROOT / name} --precision {precision}{chosen}"
    console.print(said, markup=False, highlight=False)
    options = ModelOptions(prompts=PROMPTS)
    request = ExportRequest(
        str(MODEL), ROOT / name, precision=precision, pipeline=pipeline, options=options
    )
    measure = partial(export_timing, threads=None, prompts=PROMPTS)
    return Row(name, precision, export(request, Steps(Console(stderr=True)), measure))


def print_table(rows: list[Row], console: Console) -> None:
    """One line an export, and below it why the refused one was refused."""
    table = Table("precision", "verdict", "error", "nodes", "norms", "skip", "attention", "MiB")
    for row in rows:
        verdict = row.done.report.verdict
        worst = max((o.ratio for o in verdict.outputs if o.ratio is not None), default=None)
        fused = {f.kind: f"{f.engine}/{f.expected}" for f in row.done.report.fusions}
        table.add_row(
            row.name,
            verdict.outcome,
            f"{times(worst)} eager {row.done.report.floor_dtype}"
            if worst is not None
            else "not finite",
            str(row.done.nodes or "-"),
            fused.get("rms-norm", "-"),
            fused.get("residual+norm", "-"),
            fused.get("attention", "-"),
            f"{row.done.size / 2**20:.0f}" if row.done.size else "-",
        )
    console.print(table)
    for row in rows:
        if row.done.bundle is not None:  # fp16 and bf16 are for hardware that computes in them
            said = row.done.speed or "not timed: the engine is for other hardware"
            console.print(f"{row.name}: {said}", markup=False, highlight=False)
        for reason in row.done.report.verdict.reasons:
            text = f"{row.name}: {reason}"
            console.print(text, markup=False, highlight=False)


def run_without_torch(console: Console) -> None:
    """Run the prompts in a process that can load no torch, through the command line."""
    arguments = [
        "run",
        str(ROOT / "fp32"),
        "--prompts",
        str(PROMPTS),
        "-o",
        str(ROOT / "out.safetensors"),
    ]
    console.print(f"\nenginecast {' '.join(arguments)}")
    code = (
        "import sys\n"
        "from enginecast.cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n    print('torch imported:', 'torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


if __name__ == "__main__":
    main()
