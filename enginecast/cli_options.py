"""The options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, pkg.mod:factory, or .pt2.")]
BundleDir = Annotated[Path, typer.Argument(metavar="DIR", help="A bundle.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
AllowCode = Annotated[bool, typer.Option(help="Load files whose loading can run code.")]
RandomWeights = Annotated[
    int | None, typer.Option(metavar="SEED", help="Random weights for a config without any.")
]
Inputs = Annotated[Path | None, typer.Option(metavar="FILE", help="Inputs as safetensors.")]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help="One prompt a line.")]
Dynamic = Annotated[
    list[str] | None, typer.Option(metavar="NAME:DIM=MIN..MAX", help="Range of a dimension.")
]
Precision = Annotated[str | None, typer.Option(help="fp32, fp16 or bf16: a preset pipeline.")]
PipelineText = Annotated[
    str | None, typer.Option("--pipeline", metavar="SPEC", help="Passes instead of a preset.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Provider = Annotated[
    list[str] | None, typer.Option(help="ONNX Runtime execution provider; repeatable.")
]
Threads = Annotated[int | None, typer.Option(help="Threads within one operator.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no tables.")]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Show the log.")]
