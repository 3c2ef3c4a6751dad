"""`enginecast doctor`: what this machine has, and what is missing."""

import json

from rich.console import Console
from rich.table import Table

from enginecast.cli.options.groups import AsJson
from enginecast.doctor.checks import CPU_FEATURES, Package, Report, TensorRT


def doctor(as_json: AsJson = False) -> None:
    """Versions, providers, GPU; what is missing and how to get it."""
    from enginecast.doctor.checks import examine

    report = examine(tensorrt=True)
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        show(report, Console(emoji=False))


def show(report: Report, console: Console) -> None:
    """Print the report for people."""
    console.print(f"enginecast {report.enginecast} on Python {report.python}, {report.platform}")
    console.print(_package_table(report.packages))
    for package in report.packages:
        if package.extra and not package.fits:
            console.print(
                f"to add '{package.extra}': {package.repair}", markup=False, soft_wrap=True
            )
    if report.cpu_features:
        console.print(_cpu_table(report.cpu_features))
    console.print(f"ONNX Runtime providers: {', '.join(report.providers) or 'none'}")
    if report.torchscript is not None:
        state = "there, deprecated by PyTorch since 2.11" if report.torchscript else "dropped"
        console.print(f"TorchScript in torch: {state}")
    for gpu in report.gpus:
        console.print(f"GPU: {gpu.name} ({gpu.arch}), {gpu.memory / 2**30:.0f} GiB")
    if not report.gpus:
        console.print(
            f"GPU: none that torch sees (torch's CUDA: {report.torch_cuda or 'CPU build'})"
        )
    if report.tensorrt is not None:
        _show_tensorrt(report.tensorrt, console)
    for problem in report.problems:
        console.print(f"[bold red]problem[/]: {problem.what}")
        console.print(f"  {problem.repair}", markup=False, soft_wrap=True)
    if not report.problems:
        console.print("[bold green]no problems[/]")


def _show_tensorrt(found: TensorRT, console: Console) -> None:
    installed = [one for one in found.libraries if one.installed]
    versions = [f"{one.name} {one.version or 'does not import'}" for one in installed]
    console.print(f"TensorRT: {', '.join(versions) or 'not installed'}")
    console.print(f"NVIDIA driver: {found.driver or 'none'}")


def _package_table(packages: tuple[Package, ...]) -> Table:
    table = Table("package", "installed", "wanted", "for")
    for package in packages:
        needed_for = package.extra or "everything"
        table.add_row(package.name, package.version or "-", package.wanted, needed_for)
    return table


def _cpu_table(features: dict[str, bool]) -> Table:
    table = Table("CPU feature", "here", "gives")
    for name, present in features.items():
        table.add_row(name, "yes" if present else "no", CPU_FEATURES[name][1])
    return table
