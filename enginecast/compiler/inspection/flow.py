"""A model's control flow, also of one that torch.export refused: each line that decides."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from enginecast.capture.control_flow.detect.recorder import Read, record
from enginecast.capture.control_flow.detect.reporters import detect
from enginecast.capture.inputs.examples import verification_inputs
from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.refusals.explain import explain
from enginecast.capture.sources.base.source import Source
from enginecast.compiler.prepare.cases import SEED
from enginecast.compiler.prepare.program import Prepared
from enginecast.errors import CaptureError, EnginecastError

logger = logging.getLogger(__name__)

MOST_RUNS = 4
"""Of the recorder, on inputs of different sizes."""
LARGEST_RUN = 1_000_000_000
"""Parameters of a model that is run only to say more of a refusal."""
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
    """The findings of a model that torch.export refused: the recorder runs it as well.

    Args:
        goes_on: whether an export tries TorchScript next.
    """
    cause = error.__cause__
    refusals = [] if cause is None else [explain(cause)]
    runs: list[list[Read]] = []
    module = None
    with suppress(EnginecastError):  # the capture's own error is reported
        if sum(source.weight_elements().values()) <= LARGEST_RUN:
            module = source.eager()
    if module is not None:
        cases = [case.inputs for case in verification_inputs(specs, SEED)[:MOST_RUNS]]
        try:
            with quiet_torch():
                runs = record(module, cases)
        except Exception:  # the model's own errors; the capture's error is reported
            logger.debug("the recorder could not run the model", exc_info=True)
    found = [each.to_json() for each in detect(refusals=refusals, runs=runs)]
    for each in found:
        if goes_on and each["action"] == "refused":
            each["action"] = TO_TORCHSCRIPT
    return found
