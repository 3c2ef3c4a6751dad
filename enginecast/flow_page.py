"""What `enginecast inspect` says of a model's control flow: a row for each line that decides."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Console
from torch import nn

from enginecast.capture.detect import detect
from enginecast.capture.dynamo_witness import ask_dynamo
from enginecast.capture.examples import example_sizes, sample
from enginecast.capture.inputs import InputSpec
from enginecast.capture.refusal import explain
from enginecast.capture.source import Source
from enginecast.errors import CaptureError, EnginecastError
from enginecast.prepare import SEED, Prepared
from enginecast.terminal import say, table

LARGEST_RUN = 1_000_000_000
"""Parameters of a model that is run under Dynamo only to say more of a refusal."""
SHOWN_CODE = 60


def flow_of(prepared: Prepared) -> list[dict[str, Any]]:
    """The findings of a model that was captured; a program that was given has no source."""
    if prepared.source.given_program() is not None:
        return []
    names = [spec.name for spec in prepared.captured.inputs]
    found = detect(prepared.source.empty(), names, captured=True)
    return [each.to_json() for each in found]


def flow_of_refused(
    error: CaptureError, source: Source, specs: Sequence[InputSpec]
) -> list[dict[str, Any]]:
    """The findings of a model that torch.export refused; Dynamo is asked as well, with a run."""
    cause = error.__cause__
    refusals = [] if cause is None else [explain(cause)]
    verdict = None
    module = _runnable(source)
    if module is not None:
        inputs = sample(tuple(specs), example_sizes(specs), SEED)
        verdict = ask_dynamo(module, inputs)
    names = [spec.name for spec in specs]
    found = detect(source.empty(), names, refusals=refusals, verdict=verdict)
    return [each.to_json() for each in found]


def _runnable(source: Source) -> nn.Module | None:
    """Eager, where it is small enough to run only for a report."""
    try:
        if sum(source.weight_elements().values()) > LARGEST_RUN:
            return None
        return source.eager()
    except EnginecastError:
        return None  # the capture's own error is told


def print_flow(found: Sequence[dict[str, Any]], console: Console) -> None:
    """Show findings on a terminal; places whose code and action are short stay in one row."""
    if not found:
        say(console, "control flow: nothing in the model's code depends on tensors")
        return
    shown = table("control flow", "at", "code", "decided by", "module", "seen", "what is done")
    for each in found:
        place = f"{PurePath(each['file']).name}:{each['line']}" if each["file"] else "(no line)"
        shown.add_row(
            each["kind"],
            place,
            each["code"][:SHOWN_CODE] or each["reason"][:SHOWN_CODE],
            each["decides"],
            each["module"] or "(the model)",
            _seen(each),
            each["action"],
        )
    console.print(shown)


def _seen(finding: dict[str, Any]) -> str:
    """ "x12 True/False scan, export": how often, which values, and who saw it."""
    times = f"x{finding['count']} " if finding["count"] > 1 else ""
    ways = f"{'/'.join(finding['ways'])} " if finding["ways"] else ""
    return f"{times}{ways}{', '.join(finding['witnesses'])}"
