"""What `enginecast inspect DIR` says of a bundle, or of a rejected one; it needs no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from enginecast.cli.terminal.output import print_json, results, say
from enginecast.runtime.bundle.manifest import EngineRecord, Manifest, Padding
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.bundle.tensor_files import stored_dtypes
from enginecast.runtime.sessions.registry import REGISTRY, session_class
from enginecast.verification.report.files import HTML_NAME, JSON_NAME, read_report
from enginecast.verification.report.layout import print_table
from enginecast.verification.report.tables import downgrade_line, print_report
from enginecast.verification.verdict import verdict_line


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
    for line in _capture(manifest):
        say(console, line)
    if (plan := manifest.quantization) is not None:
        predicted = plan.predicted_error
        error = "not measured" if predicted is None else f"{predicted:.2g}"
        say(
            console,
            f"{plan.format} plan for {plan.arch}: predicted error {error},"
            f" allowed {plan.max_error:.2g} ({plan.plan})",
        )
    print_table(console, ("", "name", "dtype", "shape", "range"), _signature(manifest))
    for engine in manifest.engines:
        say(console, f"{engine.file}: {verdict_line(engine.verdict, manifest.arithmetic)}")
        say(console, f"  {_place(engine)}")
        # What machine code asks of the machine, and the shapes that it was built for.
        if needs := ", ".join(f"{name} {value}" for name, value in engine.requires.items()):
            say(console, f"  asks for {needs}")
        for one in engine.profile:
            least, most, tuned = (
                "x".join(map(str, sizes)) for sizes in (one.least, one.greatest, one.optimal)
            )
            say(console, f"  {one.name} {least} .. {most}, tuned for {tuned}")
        weights = ", ".join(
            f"{each.tensors} tensors {each.dtype} ({each.bytes / 2**20:.2f} MiB)"
            for each in stored.get(engine.file, ())
        )
        say(console, f"  {engine.weights or 'weights'}: {weights or f'all in {engine.file}'}")
    if manifest.fusion:
        columns = ("fusion", "expected", "program", "engine", "runtime", "missing")
        rows = []
        for found in manifest.fusion:
            counts = (found.expected, found.program, found.engine, found.runtime)
            cells = ("-" if count is None else str(count) for count in counts)
            rows.append((found.kind, *cells, "\n".join(found.missing)))
        print_table(console, columns, rows)


def show_rejected(path: Path, *, as_json: bool) -> None:
    """Print why an engine was rejected.

    Raises:
        BundleError: the report cannot be read.
    """
    report = read_report(path)
    if as_json:
        print_json(msgspec.to_builtins(report))
        return
    console = results()
    say(console, f"{report.model} in {report.precision} for {report.target}")
    say(console, f"pipeline {report.pipeline or 'none'}")
    print_report(report, console)
    page = path / HTML_NAME if (path / HTML_NAME).exists() else path / JSON_NAME
    say(console, f"nothing was published; {page} has all of it")


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
    held += [f"refuses sizes without {check.condition}" for check in manifest.size_checks]
    lacking = {each.text: downgrade_line(each) for each in manifest.downgrades}
    notes = (note for note in manifest.notes if note not in lacking)
    return [*tried, *held, *_padding(manifest.padding), *notes, *lacking.values()]


def _padding(found: Padding | None) -> list[str]:
    """Which outputs are computed without the work on padding, and why others are not."""
    if found is None:
        return []
    where = "at the end of a row" if found.side == "right" else "wherever it is"
    done = [f"padding ({found.mask}) is left out {where}: {', '.join(found.outputs)}"]
    kept = [f"padding is computed for {name}: {why}" for name, why in found.reasons.items()]
    return [*(done if found.outputs else []), *kept]


def _place(engine: EngineRecord) -> str:
    """Where the verdict was reached: "onnxruntime 1.31.1, CPUExecutionProvider"."""
    where = engine.verdict.where
    versions = where.versions
    known = engine.target in REGISTRY.known()
    packages = session_class(engine.target).packages if known else ()
    runtime = next((f"{name} {versions[name]}" for name in packages[::-1] if name in versions), "")
    ran = f"{where.provider} of {runtime}" if where.provider else "no provider of this kind"
    return f"for {engine.target} on {', '.join(engine.providers)}; judged with {ran}"


def _signature(manifest: Manifest) -> Iterator[Sequence[str]]:
    for spec in manifest.inputs:
        bounds = "" if spec.minimum is None else f"{spec.minimum:g}..{spec.maximum:g}"
        yield "input", spec.name, spec.dtype, _shape(spec.shape), bounds
    for output in manifest.outputs:
        yield "output", output.name, output.dtype, _shape(output.shape), ""
    for name, (least, most) in manifest.symbols.items():
        step = f"/{manifest.steps[name]}" if name in manifest.steps else ""
        yield "symbol", name, "", "", f"{least}..{most}{step}"


def _shape(dims: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, dims))}]"
