"""One model through the pipeline: built, run in eager, exported, judged."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from harness import keep_rows, one_line, without_folders
from product import export, reasons
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.outputs.flatten import name_result
from enginecast.capture.sources.base.source import Source
from enginecast.compiler.prepare.open_model import input_specs, open_model
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


def examine(model_type: str, folder: Path) -> Row:
    """Take one model type through all stages; what the folder keeps says how far it came."""
    row = Row(model_type)
    with contextlib.suppress(_EndedError):
        for _ in _stages(row, folder):
            keep_rows([row], folder)
    return row


class _EndedError(Exception):
    """The row is complete."""


def _stages(row: Row, folder: Path) -> Iterator[None]:
    try:
        source, specs = first_that_runs(row, folder)
    except NotBuiltError as error:
        _end(row, "not built", str(error))
    except NotRunError as error:
        _end(row, "not run in eager", str(error))
    row.stage, row.outcome, row.reason = "export", "crashed", "the process died"
    yield
    name = source.name if row.model_type in ENTRIES else str(folder / "model")
    given = ("--inputs", str(folder / INPUTS)) if (folder / INPUTS).is_file() else ()
    code, reported = export(name, folder / "bundle", ("--no-speed", *given))
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
    row.outcome, row.reason = outcome, one_line(reason, 500)
    raise _EndedError


def _not_verified(row: Row, code: int, reported: dict[str, Any]) -> None:
    if code in (2, 3):
        _end(row, "refused", f"{reported.get('error')}: {reported.get('message')}")
    if code == 1:
        _end(row, "rejected", "; ".join(reasons(reported)[:3]))
    _end(row, "crashed", f"exit code {code}")


def first_that_runs(row: Row, folder: Path) -> tuple[Source, tuple[InputSpec, ...]]:
    """The first tiny model of a type that eager runs, saved and opened again."""
    said = []
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
            said.append(f"{type(error).__name__}: {error}")
            if isinstance(error, EnginecastError) or len(said) > 2:
                break  # smaller or larger makes no difference
            continue
        if place.is_dir():
            (folder / "model").symlink_to(place.name)
        return source, known.specs
    raise NotRunError(said[0])


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
