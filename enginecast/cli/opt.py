"""`enginecast opt`: passes alone, with what each changed and what the comparison after it found."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from enginecast.cli.options.groups import (
    Arch,
    AsJson,
    Device,
    Model,
    ModelFlags,
    Precision,
    grouped,
    require_folder,
)
from enginecast.cli.terminal.output import (
    print_json,
    progress,
    results_apart,
    say,
    standard_output,
    table,
)
from enginecast.errors import UsageError

if TYPE_CHECKING:
    from enginecast.compiler.opt import Rewrite

SITE = ("node", "module", "source", "reason", "note")
"""What `--json` says of a site."""


@grouped
@results_apart()
def opt(
    model: Model,
    model_flags: ModelFlags,
    pipeline: Annotated[str | None, typer.Option(metavar="SPEC", help="Passes to run.")] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run its preset and its lowering passes, too."),
    ] = None,
    precision: Precision = None,
    device: Device = None,
    arch: Arch = None,
    print_ir: Annotated[bool, typer.Option("--print-ir", help="Print the program.")] = False,
    print_diff: Annotated[bool, typer.Option("--print-diff", help="Print each change.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT.pt2", help="Save the program.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run passes alone, with a check after each."""
    if target is None and (pipeline is None or precision or device or arch):
        raise UsageError(
            "expected --pipeline SPEC alone, or --target NAME with what an export for it takes:"
            " --pipeline or --precision, --device, --arch"
        )
    if output is not None:
        require_folder(output)
        if output.suffix != ".pt2":
            raise UsageError(f"-o {output}: expected a name that ends in .pt2")
    from enginecast.compiler.opt import run_passes, save
    from enginecast.compiler.prepare import prepare
    from enginecast.compiler.request import ExportRequest
    from enginecast.compiler.steps import Steps
    from enginecast.passes.registry import build

    lowering = ""
    if target is not None:
        config = ExportRequest(
            model, target=target, precision=precision, pipeline=pipeline, device=device, arch=arch
        ).resolve()
        pipeline, lowering = config.pipeline, config.lowering
    passes, after, console = build(pipeline or ""), build(lowering), progress()
    steps = Steps(console)
    prepared = prepare(model_flags.source(model), model_flags.options(), steps)
    done = run_passes(prepared, passes, steps, after)
    saved = output is not None and not done.failures
    if output is not None and saved:
        save(done.program, output)
    if as_json:
        print_json(_as_json(done, print_ir, print_diff, output if saved else None))
    else:
        _show(done, print_ir, print_diff, console)
    for failure in done.failures:
        say(console, f"error: {failure}", "bold red")
    if done.failures:
        say(console, "`enginecast bisect` with this pipeline names the sites that do harm.")
    if output is not None:
        say(console, f"{output}: saved" if saved else f"{output}: not written")
    raise typer.Exit(1 if done.failures else 0)


def _show(done: "Rewrite", print_ir: bool, print_diff: bool, console: Console) -> None:
    """Tables where progress goes; texts, which may be piped on, on standard output."""
    from enginecast.verify.metrics import times

    shown = table("pass", "rewritten", "left alone", "ms", "worst place", "error / floor")
    for run, check in zip(done.runs, done.checks, strict=True):
        ratio = "equal" if check.worst_error == 0 else times(check.worst_ratio)
        left, spent = len(run.sites) - run.rewritten, f"{run.seconds * 1e3:.0f}"
        name, place = run.pass_.name, f"{check.worst_place} {check.worst_source}".strip()
        shown.add_row(name, str(run.rewritten), str(left), spent, place, ratio)
    console.print(shown)
    for run in done.runs:
        for site in run.sites:
            if site.reason:
                place = f"{site.module} {site.source}".strip()
                say(console, f"{run.pass_.name} left {place} alone: {site.reason}")
    texts = [f"# {run.pass_.name}\n{diff}" for run, diff in zip(done.runs, done.diffs, strict=True)]
    for text in (*(texts if print_diff else ()), *([done.texts[-1]] if print_ir else ())):
        print(text, end="", file=standard_output())


def _as_json(
    done: "Rewrite", print_ir: bool, print_diff: bool, output: Path | None
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "output": None if output is None else str(output),
        "passes": [
            {
                "name": run.pass_.name,
                "rewritten": run.rewritten,
                "seconds": run.seconds,
                "failure": check.failure,
                "worst_place": check.worst_place,
                "worst_error": check.worst_error,
                "worst_ratio": check.worst_ratio,
                "sites": [{name: getattr(site, name) for name in SITE} for site in run.sites],
            }
            | ({"diff": diff} if print_diff else {})
            for run, check, diff in zip(done.runs, done.checks, done.diffs, strict=True)
        ],
    }
    return content | ({"ir": done.texts[-1]} if print_ir else {})
