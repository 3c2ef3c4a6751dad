"""What the commands that load engines do: verify, run, inspect of a bundle.  None imports torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from enginecast.check import verify_bundle
from enginecast.runtime.arrays import Array
from enginecast.runtime.bundle import open_bundle
from enginecast.runtime.files import read_tensors, write_tensors
from enginecast.runtime.load import load
from enginecast.runtime.manifest import Manifest
from enginecast.runtime.prompts import encode_prompts, read_prompts
from enginecast.runtime.session import Engine
from enginecast.verify.report import print_verdict
from enginecast.verify.verdict import verdict_line


def print_json(content: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(content, indent=1, sort_keys=True))


def run_verify(
    bundle: Path,
    *,
    model: str | None,
    device: str,
    providers: Sequence[str] | None,
    random_weights: int | None,
    threads: int | None,
    allow_code: bool,
    as_json: bool,
) -> int:
    """Verify; return the exit code."""
    check = verify_bundle(
        bundle,
        model=model,
        device=device,
        providers=providers,
        threads=threads,
        allow_code=allow_code,
        random_weights=random_weights,
    )
    verdict = check.verdict
    if as_json:
        print_json(
            {
                "outcome": verdict.outcome,
                "engine": verdict.engine,
                "verdict": msgspec.to_builtins(verdict),
                "against": check.against,
                "completed": check.completed,
                "notes": list(check.notes),
            }
        )
    else:
        console = Console()
        print_verdict(verdict, check.floor_dtype, console)
        console.print(f"compared with {check.against}", markup=False, highlight=False)
        if check.completed:
            console.print("the bundle's verdict by emulation is now one of the engine itself")
        for note in check.notes:
            console.print(note, markup=False, highlight=False)
    return 1 if verdict.outcome == "rejected" else 0


def run_engine(
    bundle: Path,
    output: Path,
    *,
    inputs: Path | None,
    prompts: Path | None,
    device: str,
    providers: Sequence[str] | None,
    threads: int | None,
    allow_code: bool,
    as_json: bool,
) -> None:
    """Load, run, write the outputs by name."""
    with load(
        bundle, device=device, providers=providers, threads=threads, allow_code=allow_code
    ) as engine:
        truncated = 0
        if inputs is not None:
            outputs = engine.run(read_tensors(inputs))
        else:
            assert prompts is not None
            outputs, truncated = _run_prompts(engine, prompts)
        provider = engine.provider
        outcome = engine.verdict.outcome
    write_tensors(output, outputs)
    shapes = {name: list(array.shape) for name, array in outputs.items()}
    if as_json:
        print_json(
            {
                "outputs": shapes,
                "output": str(output),
                "provider": provider,
                "verdict": outcome,
                "truncated": truncated,
            }
        )
        return
    for name, shape in shapes.items():
        print(f"{name} {outputs[name].dtype} {shape}")
    if truncated:
        print(f"{truncated} prompts were cut to the longest that the model takes")
    print(f"{output} ({provider})")


def _run_prompts(engine: Engine, prompts: Path) -> tuple[dict[str, Array], int]:
    """Outputs of all prompts, and the attention mask that says which rows are padding."""
    encoded = encode_prompts(engine.folder, engine.manifest, read_prompts(prompts))
    parts = [{**engine.run(feeds), **_mask(feeds)} for feeds in encoded.batches]
    joined = {name: _join([part[name] for part in parts]) for name in parts[0]}
    return joined, encoded.truncated


def _mask(feeds: dict[str, Array]) -> dict[str, Array]:
    return {"attention_mask": feeds["attention_mask"]} if "attention_mask" in feeds else {}


def _join(parts: Sequence[Array]) -> Array:
    """Stack batches along dim 0; shorter sequences are filled up with zeros (padding rows)."""
    if len(parts) == 1:
        return parts[0]
    shape = [max(part.shape[d] for part in parts) for d in range(parts[0].ndim)]
    padded = []
    for part in parts:
        widths = [(0, 0), *((0, shape[d] - part.shape[d]) for d in range(1, part.ndim))]
        padded.append(np.pad(part, widths))
    return np.concatenate(padded)


def show_bundle(path: Path, *, as_json: bool) -> None:
    """Print what a bundle holds."""
    manifest = open_bundle(path, check="size").manifest
    if as_json:
        print_json(msgspec.to_builtins(manifest))
        return
    console = Console()
    console.print(f"{manifest.model.name}, {manifest.precision}, enginecast {manifest.enginecast}")
    console.print(f"pipeline {manifest.pipeline}", markup=False, highlight=False)
    console.print(_signature(manifest))
    for engine in manifest.engines:
        line = verdict_line(engine.verdict, manifest.precision)
        console.print(f"{engine.target} {engine.file}: {line}", markup=False, highlight=False)
        where = engine.verdict.where
        console.print(f"  on {where.provider or 'no provider'}, {where.versions}", highlight=False)
    for fusion in manifest.fusion:
        counts = f"{fusion.expected} expected, {fusion.program} in the program"
        console.print(f"  {fusion.kind}: {counts}, {fusion.engine} in the engine", highlight=False)


def _signature(manifest: Manifest) -> Table:
    table = Table("", "name", "dtype", "shape", "range")
    for spec in manifest.inputs:
        bounds = "" if spec.minimum is None else f"{spec.minimum:g}..{spec.maximum:g}"
        table.add_row("input", spec.name, spec.dtype, str(list(spec.shape)), bounds)
    for output in manifest.outputs:
        table.add_row("output", output.name, output.dtype, str(list(output.shape)), "")
    for name, (least, most) in manifest.symbols.items():
        table.add_row("symbol", name, "", "", f"{least}..{most}")
    return table
