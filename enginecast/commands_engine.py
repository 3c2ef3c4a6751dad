"""What the commands that load engines do: verify, run, inspect of a bundle.  None imports torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from enginecast.check import verify_bundle
from enginecast.errors import InputError
from enginecast.runtime.arrays import Array
from enginecast.runtime.bundle import open_bundle
from enginecast.runtime.files import read_tensors, write_tensors
from enginecast.runtime.load import load
from enginecast.runtime.manifest import EngineRecord, Fusion, Manifest
from enginecast.runtime.prompts import encode_prompts, read_prompts
from enginecast.runtime.session import Engine
from enginecast.runtime.stored import stored_dtypes
from enginecast.terminal import results, results_apart, say, standard_output, table
from enginecast.verify.report import print_verdict
from enginecast.verify.verdict import verdict_line


def print_json(content: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(content, indent=1, sort_keys=True), file=standard_output())


@results_apart()
def run_verify(
    bundle: Path,
    *,
    model: str | None,
    device: str | None,
    providers: Sequence[str] | None,
    prefer: Sequence[str] | None,
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
        prefer=prefer,
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
                "backend": check.backend,
                "layers": list(check.layers),
                "notes": list(check.notes),
            }
        )
    else:
        console = results()
        print_verdict(verdict, check.floor_dtype, console)
        say(console, f"compared with {check.against}, run by {check.backend}")
        for line in check.layers:
            say(console, line)
        if check.completed:
            say(console, "the bundle's verdict by emulation is now one of the engine itself")
        for note in check.notes:
            say(console, note)
    return 1 if verdict.outcome == "rejected" else 0


@results_apart()
def run_engine(
    bundle: Path,
    output: Path,
    *,
    inputs: Path | None,
    prompts: Path | None,
    device: str | None,
    providers: Sequence[str] | None,
    prefer: Sequence[str] | None,
    threads: int | None,
    allow_code: bool,
    as_json: bool,
) -> None:
    """Load, run, write the outputs by name."""
    with load(
        bundle,
        device=device,
        providers=providers,
        prefer=prefer,
        threads=threads,
        allow_code=allow_code,
    ) as engine:
        truncated = 0
        outputs: dict[str, Array]
        if inputs is not None:
            outputs = engine.run(read_tensors(inputs))
        else:
            assert prompts is not None
            outputs, truncated = _run_prompts(engine, prompts)
        provider, backend = engine.provider, engine.backend
        outcome = engine.verdict.outcome
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
            }
        )
        return
    console = results()
    for name, shape in shapes.items():
        say(console, f"{name} {outputs[name].dtype} {shape}")
    if truncated:
        say(console, f"prompts cut to the longest that the model takes: {truncated}")
    say(console, f"{output} ({provider})")


def _run_prompts(engine: Engine, prompts: Path) -> tuple[dict[str, Array], int]:
    """Outputs of all prompts, and the attention mask that says which rows are padding."""
    encoded = encode_prompts(engine.folder, engine.manifest, read_prompts(prompts))
    if len(encoded.batches) > 1:
        _require_batches(engine.manifest, len(encoded.batches))
    parts = [{**engine.run(feeds), **_mask(feeds)} for feeds in encoded.batches]
    joined = {name: _join([part[name] for part in parts]) for name in parts[0]}
    return joined, encoded.truncated


def _require_batches(manifest: Manifest, count: int) -> None:
    """Refuse outputs that say something of a whole batch: several cannot be made one."""
    batch = next(spec.shape[0] for spec in manifest.inputs if spec.kind == "token_ids")
    for output in manifest.outputs:
        if output.shape[:1] != (batch,):
            raise InputError(
                f"output {output.name!r}: expected the batch as its first dimension, got"
                f" {_shape(output.shape)}, so the outputs of {count} batches cannot be joined",
                hint="Run fewer prompts at a time, so that they make one batch.",
            )


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
    bundle = open_bundle(path, check="size")
    manifest = bundle.manifest
    stored = {
        engine.file: stored_dtypes(bundle.path(engine.weights))
        for engine in manifest.engines
        if engine.weights is not None
    }
    if as_json:
        print_json({**msgspec.to_builtins(manifest), "stored": msgspec.to_builtins(stored)})
        return
    console = results()
    title = (
        f"{manifest.model.name} in {manifest.asked_precision}, by enginecast {manifest.enginecast}"
    )
    say(console, f"{title}\npipeline {manifest.pipeline or 'none'}")
    for line in (*_capture(manifest), *_quantization(manifest)):
        say(console, line)
    console.print(_signature(manifest))
    for engine in manifest.engines:
        say(console, f"{engine.file}: {verdict_line(engine.verdict, manifest.arithmetic)}")
        for line in (_place(engine), *_asks(engine)):
            say(console, f"  {line}")
        weights = ", ".join(
            f"{each.tensors} tensors {each.dtype} ({each.bytes / 2**20:.2f} MiB)"
            for each in stored.get(engine.file, ())
        )
        say(console, f"  {engine.weights or 'weights'}: {weights or f'all in {engine.file}'}")
    if manifest.fusion:
        console.print(_fusions(manifest.fusion))


def _quantization(manifest: Manifest) -> list[str]:
    found = manifest.quantization
    if found is None:
        return []
    predicted = found.predicted_error
    error = "not measured" if predicted is None else f"{predicted:.2g}"
    return [
        f"{found.format} plan for {found.arch}: predicted error {error},"
        f" allowed {found.max_error:.2g} ({found.plan})"
    ]


def _capture(manifest: Manifest) -> list[str]:
    """How the model was captured, what has to hold of inputs, and what a user should know."""
    tried = [
        f"capture: {rung.name} {rung.outcome}{' at ' * bool(rung.place)}{rung.place}"
        f"{': ' * bool(rung.reason)}{rung.reason}"
        for rung in manifest.capture
    ]
    held = [
        f"refuses inputs for which `{guard.code}` at {guard.place} does not read {guard.value}"
        for guard in manifest.guards
    ]
    return [*tried, *held, *manifest.notes]


def _place(engine: EngineRecord) -> str:
    """Where the verdict was reached: "onnxruntime 1.31.1, CPUExecutionProvider"."""
    where = engine.verdict.where
    versions = where.versions
    kinds = {"tensorrt": "tensorrt", "torch-cpu": "torch", "torch-cuda": "torch"}
    package = kinds.get(where.provider, "onnx")
    found = (f"{name} {versions[name]}" for name in versions if name.startswith(package))
    runtime = next(found, "")
    ran = f"{where.provider} of {runtime}" if where.provider else "no provider of this kind"
    return f"for {engine.target} on {', '.join(engine.providers)}; judged with {ran}"


def _asks(engine: EngineRecord) -> list[str]:
    """What machine code asks of the machine that runs it, and the shapes that it was built for."""
    needs = ", ".join(f"{name} {value}" for name, value in engine.requires.items())
    shapes = [
        f"{one.name} {' .. '.join('x'.join(map(str, s)) for s in (one.least, one.greatest))}, tuned"
        f" for {'x'.join(map(str, one.optimal))}"
        for one in engine.profile
    ]
    return [*([f"asks for {needs}"] if needs else []), *shapes]


def _fusions(fusions: Sequence[Fusion]) -> Table:
    shown = table("fusion", "expected", "program", "engine", "runtime", "missing")
    for found in fusions:
        counts = (found.expected, found.program, found.engine, found.runtime)
        cells = ["-" if count is None else str(count) for count in counts]
        shown.add_row(found.kind, *cells, "\n".join(found.missing))
    return shown


def _signature(manifest: Manifest) -> Table:
    shown = table("", "name", "dtype", "shape", "range")
    for spec in manifest.inputs:
        bounds = "" if spec.minimum is None else f"{spec.minimum:g}..{spec.maximum:g}"
        shown.add_row("input", spec.name, spec.dtype, _shape(spec.shape), bounds)
    for output in manifest.outputs:
        shown.add_row("output", output.name, output.dtype, _shape(output.shape), "")
    for name, (least, most) in manifest.symbols.items():
        shown.add_row("symbol", name, "", "", f"{least}..{most}")
    return shown


def _shape(dims: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, dims))}]"
