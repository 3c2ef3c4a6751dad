"""The build log: what was asked, on what machine, what was tried, decided and measured, and the
program in the end.  A report of a defect needs no other file.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from enginecast import __version__
from enginecast.capture.examples import Case
from enginecast.capture.inputs import InputSpec
from enginecast.capture.way import Rung
from enginecast.doctor import examine
from enginecast.passes.pipeline import PassRun
from enginecast.verify.report_data import Report

LOG_NAME = "build.log"
Section = tuple[str, Iterable[str]]


def build_log(sections: Sequence[Section]) -> str:
    """The text of a log: a title and lines for each section; those without lines are left out."""
    parts = [f"enginecast {__version__} build log"]
    for title, lines in sections:
        found = list(lines)
        if found:
            parts.append("\n".join([f"== {title}", *found]))
    return "\n\n".join(parts) + "\n"


def request_lines(request: Mapping[str, Any]) -> list[str]:
    """What the user asked for, defaults included."""
    return [f"{name}: {value}" for name, value in request.items() if value not in (None, "", ())]


def machine_lines() -> list[str]:
    """Versions, providers and GPUs, as `enginecast doctor` finds them."""
    found = examine()
    packages = [
        f"{package.name} {package.version}"
        for package in found.packages
        if package.version is not None
    ]
    return [
        f"python {found.python} on {found.platform}",
        *packages,
        f"ONNX Runtime providers: {', '.join(found.providers)}",
        f"CUDA of torch: {found.torch_cuda or 'none'}",
        *(f"GPU: {gpu.name} ({gpu.arch}), {gpu.memory} bytes" for gpu in found.gpus),
    ]


def input_lines(specs: Sequence[InputSpec], cases: Sequence[Case]) -> list[str]:
    """The inputs with their ranges, and the shapes that they had in each comparison."""
    lines = []
    for spec in specs:
        dims = ", ".join(
            str(dim.size) if dim.name is None else f"{dim.name}={dim.minimum}..{dim.maximum}"
            for dim in spec.dims
        )
        values = "" if spec.low is None else f", values {spec.low}..{spec.high}"
        lines.append(f"{spec.name}: {spec.kind} {spec.dtype} [{dims}]{values}")
    for case in cases:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in case.inputs.items())
        lines.append(f"case {case.name!r}: {shapes}")
    return lines


def capture_lines(rungs: Sequence[Rung], notes: Sequence[str]) -> list[str]:
    """What was tried, in order, and what a user should know."""
    return [*(str(rung) for rung in rungs), *(f"note: {note}" for note in notes)]


def pass_lines(runs: Sequence[PassRun], report: Report) -> list[str]:
    """Each pass with its sites and what the comparison after it found."""
    checks = {check.name: check for check in report.passes}
    lines = []
    for run in runs:
        left = len(run.sites) - run.rewritten
        line = f"{run.pass_.name}: {run.rewritten} rewritten, {left} left, {run.seconds:.2f} s"
        check = checks.get(run.pass_.name)
        if check is not None:
            line += f"; {check.worst_error:.3g} at {check.worst_place or 'no module'}"
            line += f" ({check.check_seconds:.2f} s to check)"
        lines.append(line)
        lines += [
            f"    {site.module or '(root)'} {site.source}: {site.reason or 'rewritten'}"
            for site in run.sites
        ]
    return lines


def verdict_lines(report: Report) -> list[str]:
    """The verdict as JSON, which is how the manifest has it, and the time of each step."""
    verdict = msgspec.json.format(msgspec.json.encode(report.verdict), indent=1).decode()
    seconds = [f"{name}: {spent:.2f} s" for name, spent in report.seconds.items()]
    return [*verdict.splitlines(), *seconds]
