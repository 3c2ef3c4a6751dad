"""`enginecast run`: load an engine and run it.  It needs no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from enginecast.cli.options.from_fields import (
    AsJson,
    BundleDir,
    Inputs,
    Prompts,
    RunFlags,
    grouped,
    require_folder,
)
from enginecast.cli.terminal.output import print_json, results, results_apart, say
from enginecast.errors import UsageError

if TYPE_CHECKING:
    from enginecast.runtime.values.arrays import Array


@grouped
@results_apart()
def run(
    bundle: BundleDir,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Output file (safetensors).")
    ],
    how: RunFlags,
    inputs: Inputs = None,
    prompts: Prompts = None,
    pad_rows: Annotated[
        str,
        typer.Option(
            metavar="exact|zero",
            help="Compute padding rows as eager does; or return zeros and skip the work, where"
            " that changes no other row.",
        ),
    ] = "exact",
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop a run that takes longer.")
    ] = None,
    allow_non_finite: Annotated[
        bool, typer.Option("--allow-non-finite", help="Allow NaN and infinity in outputs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Load an engine and run it; needs no torch."""
    if (inputs is None) == (prompts is None):
        raise UsageError("give either --inputs FILE.safetensors or --prompts FILE.txt")
    require_folder(output)
    if pad_rows not in ("exact", "zero"):
        raise UsageError(f"--pad-rows: expected exact or zero, got {pad_rows!r}")
    from enginecast.runtime.bundle.tensor_files import read_tensors, write_tensors
    from enginecast.runtime.load import load

    with load(bundle, **how.arguments(), pad_rows=pad_rows) as engine:  # type: ignore[arg-type]
        truncated = 0
        asked: dict[str, Any] = {"timeout": timeout, "check_finite": not allow_non_finite}
        outputs: dict[str, Array]
        if inputs is not None:
            outputs = engine.run(read_tensors(inputs), **asked)
        else:
            from enginecast.runtime.prompts import read_prompts

            assert prompts is not None
            encoded = engine.encode(read_prompts(prompts), **asked)
            outputs, truncated = encoded, encoded.truncated
        provider, backend = engine.provider, engine.backend
        outcome, settings = engine.verdict.outcome, engine.settings
    write_tensors(output, outputs)
    shapes = {name: list(array.shape) for name, array in outputs.items()}
    if as_json:
        print_json(
            {
                "outputs": shapes,
                "output": str(output),
                "provider": provider,
                "backend": backend,
                "verdict": outcome,
                "truncated": truncated,
                "settings": msgspec.to_builtins(settings),
            }
        )
        return
    console = results()
    for name, shape in shapes.items():
        say(console, f"{name} {outputs[name].dtype} {shape}")
    if truncated:
        say(console, f"prompts truncated to the longest the model takes: {truncated}")
    say(console, f"{output} ({provider})")
