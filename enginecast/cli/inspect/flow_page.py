"""What `enginecast inspect` says of a model's control flow: a row for each line that decides."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.dynamo import ask_dynamo, private_copy
from enginecast.capture.control_flow.detect.findings import Finding
from enginecast.capture.control_flow.detect.recorder import Read, record
from enginecast.capture.control_flow.detect.reporters import detect
from enginecast.capture.inputs.examples import verification_inputs
from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.refusals.refusal import explain
from enginecast.capture.sources.source import Source
from enginecast.cli.terminal.output import say
from enginecast.compiler.cases import SEED
from enginecast.compiler.prepare import Prepared
from enginecast.errors import CaptureError, EnginecastError
from enginecast.verification.report.layout import print_table

logger = logging.getLogger(__name__)

MOST_RUNS = 4
"""Of the recorder, on inputs of different sizes."""
LARGEST_RUN = 1_000_000_000
"""Parameters of a model that is run under Dynamo only to say more of a refusal."""
SHOWN_CODE = 60
TO_TORCHSCRIPT = "refused by torch.export; an export tries TorchScript"


def flow_of(prepared: Prepared) -> list[dict[str, Any]]:
    """The findings of a model that was captured; a program that was given has no source."""
    if prepared.source.given_program() is not None:
        return []
    captured = prepared.captured
    rung = captured.rungs[-1].name if captured.rungs else "export"
    found = detect(
        runs=prepared.runs, decided=captured.decided, branches=captured.branches, rung=rung
    )
    return [each.to_json() for each in found]


def flow_of_refused(
    error: CaptureError, source: Source, specs: Sequence[InputSpec], *, goes_on: bool = False
) -> list[dict[str, Any]]:
    """The findings of a model that torch.export refused: the recorder and Dynamo run it as well.

    Args:
        goes_on: whether an export tries TorchScript next.
    """
    cause = error.__cause__
    refusals = [] if cause is None else [explain(cause)]
    breaks: tuple[Finding, ...] = ()
    runs: list[list[Read]] = []
    module = _runnable(source)
    if module is not None:
        cases = [case.inputs for case in verification_inputs(specs, SEED)[:MOST_RUNS]]
        runs = _runs(module, cases)
        breaks = ask_dynamo(module, cases[0])
    found = [each.to_json() for each in detect(refusals=refusals, runs=runs, breaks=breaks)]
    for each in found:
        if goes_on and each["action"] == "refused":
            each["action"] = TO_TORCHSCRIPT
    return found


def _runs(module: nn.Module, cases: Sequence[Mapping[str, Tensor]]) -> list[list[Read]]:
    """What runs of a copy read; none where the model does not run on these inputs."""
    try:
        with quiet_torch():
            return record(private_copy(module), cases)
    except Exception:  # the model's own errors; the capture's error is reported
        logger.debug("the recorder could not run the model", exc_info=True)
        return []


def _runnable(source: Source) -> nn.Module | None:
    """Eager, where it is small enough to run only for a report."""
    try:
        if sum(source.weight_elements().values()) > LARGEST_RUN:
            return None
        return source.eager()
    except EnginecastError:
        return None  # the capture's own error is reported


def print_flow(found: Sequence[dict[str, Any]], console: Console) -> None:
    """Show findings on a terminal; places whose code and action are short stay in one row."""
    if not found:
        say(console, "control flow: nothing in the model's code depends on tensors")
        return
    columns = ("control flow", "at", "code", "decided by", "module", "seen", "what is done")
    print_table(console, columns, map(_row, found), whole=2)


def _row(found: dict[str, Any]) -> Sequence[str]:
    place = f"{PurePath(found['file']).name}:{found['line']}" if found["file"] else "(no line)"
    code = (found["code"] or found["reason"])[:SHOWN_CODE]
    module = found["module"] or "(the model)"
    # "x12 True/False scan, export": how often, which values, and who saw it
    times = f"x{found['count']} " if found["count"] > 1 else ""
    values = f"{'/'.join(found['ways'])} " if found["ways"] else ""
    seen = f"{times}{values}{', '.join(found['witnesses'])}"
    return (found["kind"], place, code, found["decides"], module, seen, found["action"])
