"""One model through the export, and its bundle against eager on inputs the export did not see.

Nothing of the second comparison comes from `enginecast.verification`: a defect there must not
hide here.
"""

import copy
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from harness import one_line
from torch import Tensor, nn
from zoo.judge import difference, judge

from enginecast.capture.outputs.flatten import name_result
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import EnginecastError, InputError
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from flow.cases import Case, Model

Outcome = Literal["verified", "refused", "rejected", "crashed", "timed out", "silently wrong"]
PLACE = re.compile(r"([\w.-]+\.py):(\d+)")


@dataclass
class Row:
    """What became of one case."""

    group: str
    name: str
    outcome: Outcome = "crashed"
    rung: str = ""
    """How it was captured."""
    place: str = ""
    """`file.py:line` that a refusal names."""
    reason: str = ""
    notes: tuple[str, ...] = ()
    compared: int = 0
    """Inputs on which the bundle was compared with eager again."""
    seconds: float = 0.0


def examine(case: Case, folder: Path) -> Row:
    """Export a case in `folder`, and judge what was published."""
    row, started = Row(case.group, case.name), time.process_time()
    model = case.make(folder)
    _export(case, model, folder / "bundle", row)
    row.seconds = round(time.process_time() - started, 1)
    return row


def _export(case: Case, model: Model, bundle: Path, row: Row) -> None:
    given = copy.deepcopy(model.model)
    example = {name: tensor.clone() for name, tensor in model.example.items()}
    options = ModelOptions(dynamic=model.dynamic)
    try:
        done = export(
            ExportRequest(
                given,
                bundle,
                precision=case.precision,
                options=options,
                example=example or None,
                threads=1,
                allow_fallback=True,
            )
        )
    except EnginecastError as error:
        row.outcome = "rejected" if error.exit_code == 1 else "refused"
        _tell(row, f"{type(error).__name__}: {error.message}")
        return
    except Exception as error:  # a crash is what we are looking for
        _tell(row, f"{type(error).__name__}: {error}")
        return
    row.notes = tuple(one_line(note, 500) for note in done.report.notes)
    if done.bundle is None:
        row.outcome = "rejected"
        _tell(row, "; ".join(done.report.verdict.reasons[:3]))
        return
    row.rung = rung(json.loads((bundle / "manifest.json").read_text(encoding="utf-8")))
    wrong = list(_wrong(case, model, bundle, row))
    row.outcome = "silently wrong" if wrong else "verified"
    _tell(row, "; ".join(wrong))


def rung(manifest: Mapping[str, Any]) -> str:
    """The rung of the ladder that gave the program."""
    taken = [str(rung["name"]) for rung in manifest["capture"] if rung["outcome"] == "taken"]
    return taken[-1] if taken else ""


def _tell(row: Row, reason: str) -> None:
    row.reason = one_line(reason, 500)
    found = PLACE.search(row.reason)
    row.place = found[0] if found and row.outcome != "verified" else ""


def _wrong(case: Case, model: Model, bundle: Path, row: Row) -> Iterator[str]:
    """How the bundle differs from the original module, in eager fp32, on inputs of ours."""
    if case.precision != "fp32":
        return  # not run on this provider, or not in the target's arithmetic
    with load(bundle, threads=1) as engine:
        if isinstance(model.model, nn.Module):
            yield from _differences(engine, model.model, (model.example, *model.others), row)
            return
        source = open_source(model.model)
        judged = judge(engine, source.eager(), source.inputs())
        row.compared = judged.compared
        yield from judged.wrong
        if not judged.compared:
            yield "eager takes none of the shapes that the bundle declares"


def _differences(
    engine: Engine, module: nn.Module, inputs: tuple[Mapping[str, Tensor], ...], row: Row
) -> Iterator[str]:
    for index, feeds in enumerate(inputs):
        which = "its own example" if index == 0 else f"input {index + 1}"
        try:
            with torch.no_grad():
                fresh = copy.deepcopy(module)
                wanted = name_result(fresh(**_copied(feeds)), inputs=feeds).tensors
        except Exception:  # an input that eager does not take proves nothing
            continue
        try:
            found = engine.run(
                {n: t.numpy() for n, t in _copied(feeds).items()}, check_finite=False
            )
        except InputError as error:  # a recorded range that holds
            if index == 0:
                yield f"the engine does not take its own example: {error.message}"
            continue
        except Exception as error:
            yield f"{which}: the engine does not run: {type(error).__name__}: {error}"
            continue
        row.compared += 1
        for name, tensor in wanted.items():
            reason = difference(found[name], tensor.detach().numpy(), None)
            if reason:
                yield f"{which}: {name}: {reason}"


def _copied(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in feeds.items()}
