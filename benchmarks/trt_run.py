"""What the acceptance runs share: the file of results, all rows of one model, their times.

The file is written after every row, and rows of an earlier run on the same machine and commit stay.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_models import WEIGHTS
from gpu_peers import Bench, compiled
from gpu_results import Results, failures, show
from gpu_timing import interleaved, summary
from machine import RESULTS, machine
from trt_models import DTYPES, Subject, encoder
from trt_rows import Build, Ready, chain_row, make_row, reference_of

from enginecast.doctor.checks import driver
from enginecast.runtime.device.gpu import arch_of

COMPILED = "torch.compile"
ORT = ("onnxruntime-cuda", "onnxruntime-cpu")
SECONDS = 120.0
"""Of rounds, for one model in one precision."""


def options_of(doc: str) -> argparse.ArgumentParser:
    """The options that these runs have in common."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", default="", help="models, comma-separated")
    made.add_argument("--precision", default="", help="comma-separated; all without any")
    made.add_argument("--rounds", type=int, default=25)
    made.add_argument("--quick", action="store_true", help="tiny sizes")
    made.add_argument("--dry-run", action="store_true", help="tiny sizes, ONNX Runtime, the CPU")
    made.add_argument("--no-compile", action="store_true", help="without torch.compile")
    made.add_argument("--commit", help="of this checkout, where git is not at hand")
    made.add_argument("--out", type=Path, help="the file of results")
    return made


def run_all(
    found: Sequence[Subject],
    builds: Sequence[Build],
    precisions: Sequence[str],
    options: argparse.Namespace,
    results: Results,
) -> int:
    """All rows; 1 where one failed."""
    device = builds[0].device
    names = wanted([one.name for one in found], options.only, "--only")
    if device == "cpu":  # where ONNX Runtime has no bf16
        precisions = [name for name in precisions if name != "bf16"]
    precisions = wanted(list(precisions), options.precision, "--precision")
    for subject in found:
        if subject.name in names:
            with tempfile.TemporaryDirectory() as scratch:
                run_subject(subject, precisions, builds, Path(scratch), options, results)
    results.content["finished"] = True
    results.write()
    print(results.path)
    return 1 if failures(results.content) else 0


def wanted(known: list[str], asked: str, option: str) -> list[str]:
    """The names that were asked for; all without any."""
    names = [part for part in asked.split(",") if part]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"{option} {','.join(unknown)}: there are {', '.join(known)}")
    return names or known


def opened(name: str, device: str, options: argparse.Namespace) -> Results:
    """The file, with the rows that an earlier run on this machine and commit left.

    Args:
        name: of the run: "trt-acceptance".
        device: "cpu" for a dry run, whose file is not a result and lies elsewhere.
    """
    here = machine(options.commit, device) | {"driver": driver()}
    path = RESULTS / f"{name}-{_slug(str(here.get('gpu')))}{'-quick' if options.quick else ''}.json"
    if device == "cpu":
        path = Path(tempfile.gettempdir()) / f"{name}-dry-run.json"
    results = Results(options.out or path)
    cases: dict[str, Any] = {}
    if results.path.exists():
        before = json.loads(results.path.read_text(encoding="utf-8"))
        if before["machine"] != here:
            raise SystemExit(f"{results.path}: of another machine or commit; give another --out")
        cases = before["cases"]
    results.content = {"cases": cases, "finished": False, "machine": here, "weights": WEIGHTS}
    if device == "cpu":
        results.content["smoke"] = "of the script, on tiny shapes: no figure here means anything"
    results.write()
    return results


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def run_subject(
    subject: Subject,
    precisions: Sequence[str],
    builds: Sequence[Build],
    scratch: Path,
    options: argparse.Namespace,
    results: Results,
) -> None:
    """All rows of one model."""
    device = builds[0].device
    folder = subject.save(scratch / "model")
    case = subject.case(device)
    reference = reference_of(encoder(subject, folder, device, torch.float32), case)
    arch = None if device == "cpu" else arch_of(torch)
    for precision in precisions:
        rows = rows_of(results, f"{subject.name} {precision}")
        ready: dict[str, Ready] = {}
        for build in builds:
            row = rows[build.name] = {}
            output = scratch / f"{precision}-{build.name}"
            found = make_row(row, subject, folder, output, precision, build, arch, case, reference)
            if found is not None:
                ready[build.name] = found
            results.write()
        bench = None
        if not options.no_compile:
            dtype = DTYPES[precision]
            model = encoder(subject, folder, device, dtype)
            bench = Bench(case, model, device, dtype, _no_program)
        time_rows(rows, ready, bench, options.rounds, device)
        results.write()
        show(f"{subject.name} {precision}", rows)
    if subject.name.startswith("t5"):
        rows = rows_of(results, f"{subject.name} chain")
        rows["chain"] = {}
        chain_row(rows["chain"], subject, folder, scratch / "chain", builds[0])
        results.write()


def rows_of(results: Results, case: str) -> dict[str, dict[str, Any]]:
    """Rows by engine; those of an earlier run are there already."""
    rows: dict[str, dict[str, Any]] = results.content["cases"].setdefault(case, {"engines": {}})[
        "engines"
    ]
    return rows


def time_rows(
    rows: dict[str, dict[str, Any]],
    ready: dict[str, Ready],
    bench: Bench | None,
    rounds: int,
    device: str,
) -> None:
    """Time all engines in turns."""
    runs: dict[str, Any] = {name: one.run for name, one in ready.items()}
    if bench is not None:
        row = rows[COMPILED] = {}
        torch._dynamo.reset()
        try:
            runs[COMPILED] = compiled(bench).run
        except Exception as error:  # a peer that fails is a row, too
            row["failed"] = f"{type(error).__name__}: {error}"[:600]
    for name, times in interleaved(runs, rounds, device, SECONDS).items():
        rows[name] |= summary(times)
    compare_times(rows)


def compare_times(rows: dict[str, dict[str, Any]]) -> None:
    """What each takes in units of torch.compile and of ONNX Runtime: above 1 is faster."""
    for other, key in [(COMPILED, "over_compiled"), *((name, "over_onnxruntime") for name in ORT)]:
        base = rows.get(other, {}).get("ms")
        for row in rows.values():
            if base is not None and "ms" in row:
                row[key] = round(base / row["ms"], 3)


def _no_program() -> Any:
    raise NotImplementedError("engines are exported from a folder here")
