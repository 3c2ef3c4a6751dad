"""`enginecast opt`: passes alone, with what each changed and what the comparison after it found."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginecast.cli.options.from_fields import (
    Arch,
    AsJson,
    Device,
    Download,
    Model,
    Precision,
    grouped,
    located,
    require_folder,
)
from enginecast.cli.terminal.output import (
    loading,
    print_json,
    progress,
    results,
    results_apart,
    say,
)
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import UsageError
from enginecast.exporters.registry import DEFAULT

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from enginecast.compiler.engines.rewrite import Rewritten
    from enginecast.compiler.prepare.program import Prepared
    from enginecast.passes.ir.base import Pass

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
    if watch and (reduce or as_json or output is not None):
        other = "--reduce" if reduce else "--json" if as_json else "-o"
        raise UsageError(f"--watch cannot be combined with {other}")
    if reduce and (print_ir or print_diff):
        raise UsageError("--reduce prints no program: leave --print-ir and --print-diff out")
    if seconds is not None and not reduce:
        raise UsageError("--seconds limits --reduce, which is not given")
    if output is not None and not reduce:
        require_folder(output)
        if output.suffix != ".pt2":
            raise UsageError(f"-o {output}: expected a name that ends in .pt2")
    if reduce:
        folder = output or Path(REDUCED)
        if folder.exists() or folder.is_symlink():
            raise UsageError(
                f"{folder}: exists already", hint="Remove it, or name another with -o."
            )
        if not folder.parent.is_dir():
            raise UsageError(f"{folder}: there is no folder {folder.parent}")
    if target is None and (pipeline is None or precision or device or arch):
        raise UsageError(
            "expected --pipeline SPEC alone, or --target NAME with what an export for it takes:"
            " --pipeline or --precision, --device, --arch"
        )
    request = ExportRequest(
        model,
        target=target or DEFAULT,
        precision=precision,
        pipeline=pipeline,
        device=device,
        arch=arch,
        options=options,
    )
    request.check()
    model = located(model, download=download)
    loading()
    from enginecast.cli.opt_page import Texts, run_with_texts, show
    from enginecast.compiler.prepare.open_model import open_model
    from enginecast.compiler.prepare.program import prepare
    from enginecast.compiler.steps import Steps
    from enginecast.passes.registry import build

    lowering = ""
    if target is not None:
        config = request.resolve()
        pipeline, lowering = config.pipeline, config.lowering
    passes, after, console = build(pipeline or ""), build(lowering), progress()
    steps, before = Steps(console), Texts()
    seen = before if print_diff else None
    prepared = prepare(open_model(model, options), options, steps, watch=seen)
    if watch:
        from enginecast.cli.opt_watch import watch_passes

        return watch_passes(prepared, (pipeline or "", lowering), steps, console)
    if reduce:
        return _reduce(prepared, (*passes, *after), folder, seconds or SECONDS, as_json)
    done, texts = run_with_texts(prepared, passes, after, steps)
    ir = texts.ir if print_ir else None
    failures = [check.failure for check in done.checks if check.failure]
    saved = _save(done.program, output) if output is not None and not failures else None
    if as_json:
        diffs = [diff for _, diff in texts.diffs] if print_diff else None
        print_json(_as_json(done, diffs, ir, saved))
    else:
        shown = [*(each for each in before.diffs if each[1]), *texts.diffs] if print_diff else None
        show(done, shown, ir, prepared.captured.runs)
    for failure in failures:
        say(console, f"error: {failure}", "bold red")
    if failures:
        say(console, "`enginecast bisect` with this pipeline names the sites that do harm,")
        say(console, "and `enginecast opt --reduce` shrinks the program to what shows it.")
    if output is not None:
        say(console, f"{output}: not written" if failures else f"{output}: saved")
    raise typer.Exit(1 if failures else 0)


def _reduce(
    prepared: "Prepared", passes: Sequence["Pass"], folder: Path, seconds: float, as_json: bool
) -> None:
    """Write the smallest program on which the passes fail as they do on the model.

    Raises:
        UsageError: they do not fail.
    """
    from enginecast.reduce.script import SCRIPT, write
    from enginecast.reduce.shrink import reduce

    console = progress()
    found = reduce(
        prepared.captured.program,
        passes,
        [case.inputs for case in prepared.observed],
        seconds=seconds,
        say=lambda line: say(console, line),
    )
    if found is None:
        names = ", ".join(one.name for one in passes)
        raise UsageError(
            f"--reduce: nothing to reduce: {names or 'no pass'} ran and kept the promises",
            hint="Where an export fails, give --target and what else that export takes.",
        )
    shown, script = write(found, folder), folder / SCRIPT
    left = len(found.specimen.calls)
    if as_json:
        print_json(
            {
                "script": str(script),
                "pass": found.failure.pass_name,
                "failure": found.failure.message,
                "nodes": found.nodes,
                "left": left,
                "trials": found.trials,
                "finished": found.finished,
                "shown": shown,
            }
        )
        return
    say(results(), shown)
    more = "" if found.finished else "; the time was up, --seconds gives it more"
    say(
        results(),
        f"{script}: {left} of {found.nodes} nodes, and it fails in the same way{more}",
    )


def _save(program: "ExportedProgram", path: Path) -> Path:
    """Write a `.pt2` file, whole or not at all; return its path."""
    from torch.export import save

    from enginecast.passes.ir.edit import with_weights
    from enginecast.runtime.bundle.staging import write_file

    content = io.BytesIO()  # on a full disk torch ends the process
    save(with_weights(program), content)
    write_file(path, content.getbuffer())
    return path


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
