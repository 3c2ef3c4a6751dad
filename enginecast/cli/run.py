"""`enginecast run`: load an engine and run it.  It needs no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import typer

from enginecast.cli.options.groups import (
    AsJson,
    BundleDir,
    Inputs,
    Prompts,
    RunFlags,
    grouped,
    require_folder,
)
from enginecast.cli.terminal.output import print_json, results, results_apart, say
from enginecast.errors import InputError, UsageError
from enginecast.runtime.bundle.manifest import Manifest

if TYPE_CHECKING:
    from enginecast.runtime.engine import Engine
    from enginecast.runtime.values.arrays import Array


@grouped
@results_apart()
def run(
    bundle: BundleDir,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="safetensors.")],
    how: RunFlags,
    inputs: Inputs = None,
    prompts: Prompts = None,
    pad_rows: Annotated[
        str,
        typer.Option(
            metavar="exact|zero",
            help="Rows of padding as eager gives them; or zeros, which saves the work on them,"
            " where the export proved that no other row changes.",
        ),
    ] = "exact",
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop a run that takes longer.")
    ] = None,
    allow_non_finite: Annotated[
        bool, typer.Option("--allow-non-finite", help="Write outputs with NaN and infinities, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Load an engine and run it; needs no torch."""
    if (inputs is None) == (prompts is None):
        raise UsageError("give either --inputs FILE.safetensors or --prompts FILE.txt")
    require_folder(output)
    from enginecast.runtime.bundle.tensor_files import read_tensors, write_tensors
    from enginecast.runtime.load import load

    if pad_rows not in ("exact", "zero"):
        raise UsageError(f"--pad-rows: expected exact or zero, got {pad_rows!r}")
    with load(bundle, **how.arguments(), pad_rows=pad_rows) as engine:  # type: ignore[arg-type]
        truncated = 0
        asked: dict[str, Any] = {"timeout": timeout, "check_finite": not allow_non_finite}
        outputs: dict[str, Array]
        if inputs is not None:
            outputs = engine.run(read_tensors(inputs), **asked)
        else:
            assert prompts is not None
            outputs, truncated = _run_prompts(engine, prompts, asked)
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
        say(console, f"prompts cut to the longest that the model takes: {truncated}")
    say(console, f"{output} ({provider})")


def _run_prompts(
    engine: "Engine", prompts: Path, asked: "dict[str, Any]"
) -> "tuple[dict[str, Array], int]":
    """Outputs of all prompts, and the attention mask that says which rows are padding."""
    from enginecast.runtime.prompts import encode_prompts, read_prompts

    encoded = encode_prompts(engine.folder, engine.manifest, read_prompts(prompts))
    if len(encoded.batches) > 1:
        _require_batches(engine.manifest, len(encoded.batches))
    parts = []
    for feeds in encoded.batches:
        masks = {name: feeds[name] for name in feeds if name == "attention_mask"}
        parts.append({**engine.run(feeds, **asked), **masks})
    joined = {name: _join([part[name] for part in parts]) for name in parts[0]}
    return joined, encoded.truncated


def _require_batches(manifest: Manifest, count: int) -> None:
    """Refuse outputs that say something of a whole batch: several cannot be made one."""
    batch = next(spec.shape[0] for spec in manifest.inputs if spec.kind == "token_ids")
    for output in manifest.outputs:
        shape = ", ".join(map(str, output.shape))
        if output.shape[:1] != (batch,):
            raise InputError(
                f"output {output.name!r}: expected the batch as its first dimension, got"
                f" [{shape}], so the outputs of {count} batches cannot be joined",
                hint="Run fewer prompts at a time, so that they make one batch.",
            )


def _join(parts: "Sequence[Array]") -> "Array":
    """Stack batches along dim 0; shorter sequences are filled up with zeros (padding rows)."""
    if len(parts) == 1:
        return parts[0]
    longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        widths = [(0, most - size) for most, size in zip(longest, part.shape[1:], strict=True)]
        padded.append(np.pad(part, [(0, 0), *widths]))
    return np.concatenate(padded)
