"""`enginecast doctor`: what this machine has, and what is missing."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from enginecast.cli.options.from_fields import AsJson
from enginecast.cli.terminal.output import print_json, results, say
from enginecast.doctor.checks import CPU_FEATURES, Problem, Report
from enginecast.installation import install_command, unavailable
from enginecast.verification.report.layout import print_table


def doctor(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="List leftovers of killed exports in this folder instead."
        ),
    ] = None,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Remove leftovers and restore bundles, in FOLDER or here."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions, providers, GPU, and how to get what is missing."""
    if folder is not None or clean:
        _leftovers(folder or Path(), clean, as_json)
        return
    from enginecast.doctor.checks import examine

    report = examine(imports=True)
    report = replace(report, problems=(*report.problems, *_broken_plugins()))
    if as_json:
        print_json(report.to_json())
    else:
        show(report, results())


def _broken_plugins() -> list[Problem]:
    """The entry points of other packages that are left out; sessions alone where torch is not."""
    from enginecast.runtime.sessions.registry import REGISTRY as SESSIONS
    from enginecast.runtime.sessions.session import Session

    _, left_out = SESSIONS.sorted_out(Session)  # type: ignore[type-abstract]
    broken = [f"session {one}" for one in left_out]
    try:
        from enginecast.exporters.registry import REGISTRY as TARGETS
        from enginecast.exporters.target import Target
        from enginecast.passes.registry import all_passes

        broken += [f"target {one}" for one in TARGETS.sorted_out(Target)[1]]
        broken += [f"pass {one}" for one in all_passes()[1]]
    except Exception as error:  # a library that is missing, or broken as the report says
        if unavailable(error, "") is None:
            raise
    return [Problem(one, "Repair or uninstall that package.") for one in broken]


def _leftovers(folder: Path, clean: bool, as_json: bool) -> None:
    """What exports left behind, and what was done about it."""
    from enginecast.runtime.bundle import leftovers

    found = leftovers.find_leftovers(folder)
    done: list[bool] = []
    actions: list[str] = []  # before: what was given its name back would count as one too many
    for one in found:
        actions.append(one.action)
        done.append(clean and leftovers.clean(one))
    if as_json:
        rows = [
            {
                "path": str(one.path),
                "target": str(one.target),
                "kind": one.kind,
                "bytes": one.bytes,
                "seconds": round(one.seconds, 1),
                "in_use": one.in_use,
                "action": action,
                "done": is_done,
            }
            for one, action, is_done in zip(found, actions, done, strict=True)
        ]
        print_json({"folder": str(folder.resolve()), "leftovers": rows})
        return
    console = results()
    for one, action, is_done in zip(found, actions, done, strict=True):
        what = f"{one.path}: {one.kind}, {one.bytes / 1e6:.1f} MB, {one.seconds / 60:.0f} min old"
        past = {"remove": "removed", "restore": f"is {one.target.name} again"}
        later = {"remove": "--clean removes it", "restore": f"--clean makes it {one.target.name}"}
        state = "in use" if one.in_use else (past if is_done else later)[action]
        say(console, f"{what}: {state}")
    if not found:
        say(console, f"{folder.resolve()}: nothing was left behind")


def show(report: Report, console: Console) -> None:
    """Print the report for people."""
    say(console, f"enginecast {report.enginecast} on Python {report.python}, {report.platform}")
    packages = (
        (p.name, p.version or "-", p.wanted, p.extra or "everything") for p in report.packages
    )
    print_table(console, ("package", "installed", "wanted", "for"), packages)
    lacking = [one for one in report.packages if one.extra and not one.fits]
    for extra in dict.fromkeys(one.extra for one in lacking):
        repairs = [one.repair for one in lacking if one.extra == extra]
        repair = repairs[0] if len(repairs) == 1 else install_command(extra)
        say(console, f"to add '{extra}': {repair}")
    if report.cpu_features:
        here = report.cpu_features.items()
        features = ((name, "yes" if has else "no", CPU_FEATURES[name][1]) for name, has in here)
        print_table(console, ("CPU feature", "here", "gives"), features)
    say(console, f"ONNX Runtime providers: {', '.join(report.providers) or 'none'}")
    if report.torchscript is not None:
        state = "there, deprecated by PyTorch since 2.11" if report.torchscript else "dropped"
        say(console, f"TorchScript in torch: {state}")
    for gpu in report.gpus:
        say(console, f"GPU: {gpu.name} ({gpu.arch}), {gpu.memory / 2**30:.0f} GiB")
    if not report.gpus:
        with_torch = any(one.name == "torch" and one.version for one in report.packages)
        build = f"torch's CUDA: {report.torch_cuda or 'CPU build'}"
        seen = (
            f"none that torch sees ({build})"
            if with_torch
            else "torch, which sees it, is not installed"
        )
        say(console, f"GPU: {seen}")
    if report.tensorrt is not None:
        installed = [one for one in report.tensorrt.libraries if one.installed]
        versions = [
            f"{one.name.removesuffix('_bindings')} {one.version or 'does not import'}"
            for one in installed
        ]
        say(console, f"TensorRT: {', '.join(versions) or 'not installed'}")
        say(console, f"NVIDIA driver: {report.tensorrt.driver or 'none'}")
    for problem in report.problems:
        say(console, f"problem: {problem.what}", "bold red")
        for line in problem.repair.splitlines():
            say(console, f"  {line}")
    if not report.problems:
        say(console, "no problems", "bold green")
