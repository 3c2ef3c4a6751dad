"""`enginecast opt`: passes alone, with what each changed and what the comparison after it found."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from enginecast.cli.options.groups import (
    Arch,
    AsJson,
    Device,
    Download,
    Model,
    Precision,
    fetched,
    grouped,
    require_folder,
)
from enginecast.cli.terminal.output import (
    loading,
    print_json,
    progress,
    results,
    results_apart,
    say,
    standard_output,
)
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import UsageError
from enginecast.verification.report.layout import print_table

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from enginecast.compiler.rewrite import Rewritten
    from enginecast.passes.ir.base import Pass
    from enginecast.passes.ir.pipeline import PassRun

REDUCED = "reduced"
"""Where --reduce writes, unless -o says it."""
SECONDS = 120.0
"""How long it takes at most, unless --seconds says it."""
SITE = ("node", "module", "source", "reason", "note")
"""What `--json` says of a site."""
CHECK = ["name", "rewritten", "seconds", "failure", "worst_place", "worst_error", "worst_ratio"]
"""What it says of a pass."""


@grouped
@results_apart()
def opt(
    model: Model,
    options: ModelOptions,
    pipeline: Annotated[str | None, typer.Option(metavar="SPEC", help="Passes to run.")] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Also run this target's preset and lowering passes."),
    ] = None,
    precision: Precision = None,
    device: Device = None,
    arch: Arch = None,
    print_ir: Annotated[bool, typer.Option("--print-ir", help="Print the program.")] = False,
    print_diff: Annotated[
        bool, typer.Option("--print-diff", help="Print the IR diff of each pass.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Run again whenever a pass's file changes."),
    ] = False,
    reduce: Annotated[
        bool,
        typer.Option("--reduce", help="Shrink a program on which a pass fails to a small script."),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="N", min=1, help=f"Time limit of --reduce; default {SECONDS:.0f}."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help=f"Save the program as .pt2; with --reduce, the script's folder ({REDUCED}).",
        ),
    ] = None,
    download: Download = False,
    as_json: AsJson = False,
) -> None:
    """Run passes without an export, with a check after each."""
    _check_modes(watch, reduce, seconds, as_json, output, print_ir or print_diff)
    _check_choice(target, pipeline, precision, device, arch)
    loading()
    from enginecast.compiler.prepare import open_model, prepare
    from enginecast.compiler.rewrite import run_passes
    from enginecast.compiler.steps import Steps
    from enginecast.passes.ir.text import diff_ir
    from enginecast.passes.ir.text import print_ir as text_of
    from enginecast.passes.registry import build

    lowering = ""
    model = fetched(model) if download else model
    if target is not None:
        config = ExportRequest(
            model, target=target, precision=precision, pipeline=pipeline, device=device, arch=arch
        ).resolve()
        pipeline, lowering = config.pipeline, config.lowering
    passes, after, console = build(pipeline or ""), build(lowering), progress()
    steps = Steps(console)
    prepared = prepare(open_model(model, options), options, steps)
    if watch:
        from enginecast.cli.opt_watch import watch_passes

        return watch_passes(prepared, (pipeline or "", lowering), steps, console)
    if reduce:
        from enginecast.cli.opt_reduce import reduce_program

        where, limit = output or Path(REDUCED), seconds or SECONDS
        return reduce_program(prepared, (*passes, *after), where, limit, as_json)
    texts = [text_of(prepared.captured.program)]

    def keep_text(_pass: "Pass", program: "ExportedProgram", _run: "PassRun") -> None:
        texts.append(text_of(program))

    done = run_passes(prepared, passes, steps, after, [keep_text])
    diffs = list(map(diff_ir, texts, texts[1:])) if print_diff else None
    ir = texts[-1] if print_ir else None
    failures = [check.failure for check in done.checks if check.failure]
    saved = _save(done.program, output) if output is not None and not failures else None
    if as_json:
        print_json(_as_json(done, diffs, ir, saved))
    else:
        show(done, diffs, ir)
    _end(failures, output, console)


def _end(failures: Sequence[str], output: Path | None, console: Console) -> NoReturn:
    """Report what failed and what was saved; leave with the exit code."""
    for failure in failures:
        say(console, f"error: {failure}", "bold red")
    if failures:
        say(console, "`enginecast bisect` with this pipeline names the sites that do harm,")
        say(console, "and `enginecast opt --reduce` shrinks the program to what shows it.")
    if output is not None:
        say(console, f"{output}: not written" if failures else f"{output}: saved")
    raise typer.Exit(1 if failures else 0)


def _check_modes(
    watch: bool,
    reduce: bool,
    seconds: float | None,
    as_json: bool,
    output: Path | None,
    prints: bool,
) -> None:
    """Refuse options that do not go together, and a folder that is in the way."""
    if watch and (reduce or as_json or output is not None):
        other = "--reduce" if reduce else "--json" if as_json else "-o"
        raise UsageError(f"--watch cannot be combined with {other}")
    if reduce and prints:
        raise UsageError("--reduce prints no program: leave --print-ir and --print-diff out")
    if seconds is not None and not reduce:
        raise UsageError("--seconds limits --reduce, which is not given")
    if output is not None and not reduce:
        _require_pt2(output)
    folder = output or Path(REDUCED)
    if reduce and (folder.exists() or folder.is_symlink()):
        raise UsageError(f"{folder}: exists already", hint="Remove it, or name another with -o.")
    if reduce and not folder.parent.is_dir():
        raise UsageError(f"{folder}: there is no folder {folder.parent}")


def _check_choice(target: str | None, pipeline: str | None, *others: str | None) -> None:
    """Refuse what does not say which passes to run."""
    if target is None and (pipeline is None or any(others)):
        raise UsageError(
            "expected --pipeline SPEC alone, or --target NAME with what an export for it takes:"
            " --pipeline or --precision, --device, --arch"
        )


def _require_pt2(output: Path) -> None:
    require_folder(output)
    if output.suffix != ".pt2":
        raise UsageError(f"-o {output}: expected a name that ends in .pt2")


def _save(program: "ExportedProgram", path: Path) -> Path:
    """Write a `.pt2` file, whole or not at all; return its path."""
    from torch.export import save

    from enginecast.passes.ir.edit import with_weights
    from enginecast.runtime.bundle.staging import write_file

    content = io.BytesIO()  # on a full disk torch ends the process
    save(with_weights(program), content)
    write_file(path, content.getbuffer())
    return path


def show(done: "Rewritten", diffs: Sequence[str] | None, ir: str | None) -> None:
    """Print tables; where progress goes if texts go to standard output, to be piped on."""
    from enginecast.verification.metrics import times

    console = results() if diffs is None and ir is None else progress()
    rows = []
    for run, check in zip(done.runs, done.checks, strict=True):
        found = "not finite" if check.worst_ratio is None else times(check.worst_ratio)
        ratio = "equal" if check.worst_error == 0 else found
        left, spent = len(run.sites) - run.rewritten, f"{run.seconds * 1e3:.0f}"
        name, place = run.pass_.name, f"{check.worst_place} {check.worst_source}".strip()
        rows.append((name, str(run.rewritten), str(left), spent, place, ratio))
    columns = ("pass", "rewritten", "left alone", "ms", "worst place", "error / floor")
    print_table(console, columns, rows)
    for run in done.runs:
        for site in run.sites:
            if site.reason:
                place = f"{site.module} {site.source}".strip()
                say(console, f"{run.pass_.name} left {place} alone: {site.reason}")
    for run, diff in zip(done.runs, diffs or (), strict=False):
        print(f"# {run.pass_.name}\n{diff}", end="", file=standard_output())
    print(ir or "", end="", file=standard_output())


def _as_json(
    done: "Rewritten", diffs: Sequence[str] | None, ir: str | None, output: Path | None
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "output": None if output is None else str(output),
        "passes": [
            {name: getattr(check, name) for name in CHECK}
            | {"sites": [{name: getattr(site, name) for name in SITE} for site in run.sites]}
            | ({} if diffs is None else {"diff": diffs[index]})
            for index, (run, check) in enumerate(zip(done.runs, done.checks, strict=True))
        ],
    }
    return content | ({} if ir is None else {"ir": ir})
