"""The options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from enginecast.errors import UsageError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, pkg.mod:factory, or .pt2.")]
OtherModel = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Compare with this model, not with the stored reference."),
]
BundleDir = Annotated[Path, typer.Argument(metavar="DIR", help="A bundle.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Load files whose loading can run code.")
]
Thorough = Annotated[
    bool, typer.Option("--thorough", help="Verify on the longest texts, whatever the model's size.")
]
RandomWeights = Annotated[
    int | None,
    typer.Option(metavar="SEED", help="Random weights, for a folder with a config alone."),
]
Inputs = Annotated[Path | None, typer.Option(metavar="FILE", help="Inputs as safetensors.")]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, one a line.")]
Dynamic = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME:DIM=MIN..MAX", help="Sizes of a dimension; repeatable."),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,...", help="Outputs to keep, in order; repeatable."),
]
HiddenStates = Annotated[
    list[str] | None,
    typer.Option(
        "--hidden-state", metavar="INDEX", help="A hidden state as an output; repeatable."
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A preset pipeline: fp32, fp16, bf16, mixed; int8, fp8; int8-storage, int4-storage,"
        " fp8-storage (weights only).",
    ),
]
PipelineText = Annotated[
    str | None, typer.Option("--pipeline", metavar="SPEC", help="Passes instead of a preset.")
]
Device = Annotated[str | None, typer.Option(metavar="cpu|cuda", help="What the engine runs on.")]
Provider = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="ONNX Runtime execution provider; repeatable."),
]
Prefer = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="Engines to try in this order, such as onnxruntime-cpu; repeatable."
    ),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Threads within one operator.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no tables.")]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, help="Show the log.", show_default=False)
]
Target = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What runs the engine: onnxruntime, tensorrt, aotinductor, torchscript.",
    ),
]
Also = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A second engine in the bundle: onnxruntime."),
]
Arch = Annotated[str | None, typer.Option(metavar="NAME", help="GPU architecture, such as sm90.")]
MaxError = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Largest relative error of an output that quantisation may cause."
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Carry out this quantisation plan (JSON)."),
]
AllowUnverified = Annotated[
    bool,
    typer.Option(
        "--allow-unverified-branches",
        help="Publish although no input was found for some way of a branch.",
    ),
]
Fallback = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="How far a capture may go: none, rewrite, specialise, torchscript."
    ),
]
SkipPatterns = Annotated[
    list[str] | None,
    typer.Option(metavar="RE", help="Modules that stay as they are; repeatable."),
]
DropGuilty = Annotated[
    bool,
    typer.Option("--drop-guilty", help="Leave out the sites that break a pass's promise."),
]
SkipClasses = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Classes that stay as they are; repeatable."),
]


def require_folder(output: Path) -> None:
    """Refuse a file that could not be written, before the work and not after it."""
    if not output.parent.is_dir():
        raise UsageError(f"-o {output}: there is no folder {output.parent}")
    if output.is_dir():
        raise UsageError(f"-o {output}: expected the name of a file, got a folder")
