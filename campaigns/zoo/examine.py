"""One model through the pipeline: built, run in eager, exported, judged."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.outputs.flatten import name_result
from enginecast.capture.sources.source import Source
from enginecast.cli.app import main
from enginecast.compiler.prepare import input_specs, open_model
from enginecast.compiler.request import ModelOptions
from enginecast.errors import CaptureError, EnginecastError
from enginecast.runtime.load import load
from zoo.entries import ENTRIES, MADE
from zoo.given import GIVEN, given_inputs
from zoo.judge import judge
from zoo.tiny import NotBuiltError, build, save

INPUTS = "inputs.safetensors"
Outcome = Literal[
    "verified",
    "refused",
    "rejected",
    "crashed",
    "timed out",
    "silently wrong",
    "not built",
    "not run in eager",
]
RAN_IN_EAGER: tuple[Outcome, ...] = (
    "verified",
    "refused",
    "rejected",
    "crashed",
    "timed out",
    "silently wrong",
)


@dataclass
class Row:
    """What became of one model type."""

    model_type: str
    model_class: str = ""
    parameters: int = 0
    outcome: Outcome = "not built"
    reason: str = ""
    stage: str = "build"
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


class NotRunError(Exception):
    """Eager does not take the derived inputs."""


def examine(model_type: str, folder: Path, *, eager_only: bool = False) -> Row:
    """Take one model type through all stages; `folder/row.json` says how far it came.

    Args:
        model_type: of transformers.
        folder: for what is made on the way.
        eager_only: stop before the export, as if it had gone well.
    """
    row = Row(model_type)
    with contextlib.suppress(_EndedError):
        for _ in _stages(row, folder):
            write(row, folder)
            if eager_only:
                _end(row, "verified", "")
    write(row, folder)
    return row


def write(row: Row, folder: Path) -> None:
    """Keep a row: a child that dies leaves what it knew."""
    (folder / "row.json").write_text(json.dumps(asdict(row)), encoding="utf-8")


class _EndedError(Exception):
    """The row is complete."""


def _stages(row: Row, folder: Path) -> Iterator[None]:
    try:
        source, specs = _first_that_runs(row, folder)
    except NotBuiltError as error:
        _end(row, "not built", str(error))
    except NotRunError as error:
        _end(row, "not run in eager", str(error))
    row.stage, row.outcome, row.reason = "export", "crashed", "the process died"
    yield
    code, reported = _export(source.name if row.model_type in ENTRIES else "", folder)
    if code:
        _not_verified(row, code, reported)
    row.stage, row.notes = "judge", tuple(map(without_folders, reported.get("notes", ())))
    yield
    with load(folder / "bundle", threads=1) as engine:
        found = judge(engine, source.eager(), specs)
    if found.wrong:
        _end(row, "silently wrong", "; ".join(found.wrong[:3]))
    if not found.compared:
        _end(row, "silently wrong", "eager takes none of the shapes that the bundle declares")
    _end(row, "verified", "")


def _end(row: Row, outcome: Outcome, reason: str) -> None:
    row.outcome, row.reason = outcome, " ".join(without_folders(reason).split())[:500]
    raise _EndedError


def without_folders(text: str) -> str:
    """A message with the names of files alone: their folders are this machine's."""
    return re.sub(r"(/[\w.+-]+)+/", "", text)


def _not_verified(row: Row, code: int, reported: dict[str, Any]) -> None:
    if code in (2, 3):
        _end(row, "refused", f"{reported.get('error')}: {reported.get('message')}")
    if code == 1:
        reasons = reported.get("verdict", {}).get("reasons") or [reported.get("message", "")]
        _end(row, "rejected", "; ".join(reasons[:3]))
    _end(row, "crashed", f"exit code {code}")


def _first_that_runs(row: Row, folder: Path) -> tuple[Source, tuple[InputSpec, ...]]:
    """The first tiny model of a type that eager runs, saved and opened again."""
    reasons = []
    for index, model in enumerate(build(row.model_type)):
        row.model_class = type(model).__name__
        row.parameters = sum(parameter.numel() for parameter in model.parameters())
        place = folder / f"model-{index}"
        try:
            name, options = _place(model, row, place), _options(model, folder)
            source = open_model(name, options)
            known = input_specs(source, options.inputs, options.dynamic)
            _run_eager(source.eager(), known.specs, known.given)
        except Exception as error:  # whatever the model's code raises
            reasons.append(f"{type(error).__name__}: {error}")
            if isinstance(error, EnginecastError) or len(reasons) > 2:
                break  # smaller or larger makes no difference
            continue
        if place.is_dir():
            (folder / "model").symlink_to(place.name)
        return source, known.specs
    raise NotRunError(reasons[0])


def _place(model: PreTrainedModel, row: Row, place: Path) -> str:
    """What MODEL is: a folder as users have it, or the factory that makes this one."""
    entry = ENTRIES.get(row.model_type)
    if entry is None:
        return str(save(model, place))
    row.model_class += f".{entry.called}" if entry.called else ""
    MADE.append((entry.wrap(model), given_inputs(row.model_type, model.config)))
    return "zoo.entries:make"


def _options(model: PreTrainedModel, folder: Path) -> ModelOptions:
    """The inputs that are given for a type, in the file that the export reads, too."""
    if model.config.model_type not in GIVEN or model.config.model_type in ENTRIES:
        return ModelOptions()
    file = folder / INPUTS
    save_file(given_inputs(model.config.model_type, model.config), file)
    return ModelOptions(inputs=file)


def _run_eager(
    module: nn.Module, specs: tuple[InputSpec, ...], given: Mapping[str, Tensor]
) -> None:
    inputs = dict(given) or sample(specs, example_sizes(specs), 0)
    with torch.no_grad():
        first, second = (_named(module(**inputs)) for _ in range(2))
    for name, tensor in first.items():
        if not torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(second[name])):
            raise NotRunError(f"{name} differs from call to call: forward draws random numbers")


def _named(value: object) -> dict[str, Tensor]:
    try:
        return name_result(value).tensors
    except CaptureError:
        return {}  # what the product cannot name is for it to refuse


def _export(model: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Run the command; exit code, and what it printed as JSON."""
    model = model or str(folder / "model")
    arguments = ["export", model, "-o", str(folder / "bundle"), "--json"]
    arguments += ["--threads", "1", "--no-speed"]
    if (folder / INPUTS).is_file():
        arguments += ["--inputs", str(folder / INPUTS)]
    code = 0
    with (folder / "out.json").open("w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        try:
            main(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 70
    sys.stderr.flush()
    try:
        reported = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        reported = {}
    return code, reported
