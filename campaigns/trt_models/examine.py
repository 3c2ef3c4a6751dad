"""One verified model of the zoo or of vision: its networks, parsed and built by TensorRT-RTX."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir
import torch
from harness import keep_rows, one_line
from trt_gate.ask import trt
from vision.models import ENTRIES
from zoo import examine as zoo
from zoo.entries import ENTRIES as CALLED

from enginecast.capture.sources.base.source import Source
from enginecast.compiler.engines.lower_and_run import lowering_request
from enginecast.compiler.prepare.open_model import open_model
from enginecast.compiler.prepare.program import prepare
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import EnginecastError
from enginecast.exporters.registry import target_of
from enginecast.exporters.tensorrt.gate.check import check_ready
from enginecast.exporters.tensorrt.gate.parser import check_parsed, shortened
from enginecast.exporters.tensorrt.lower import NETWORK_FILE
from enginecast.exporters.tensorrt.profiles import LARGEST
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build
from enginecast.runtime.sessions.tensorrt.library import RTX

PRECISIONS = ("fp32", "fp16")
LONGEST = 512
"""Of a dimension that the model takes in any size: a profile has an end."""
BUILDS = "builds"


@dataclass
class Row:
    """What became of one model."""

    group: str
    name: str
    answers: dict[str, str] = field(default_factory=dict)
    """By precision: `BUILDS`, or why not."""
    seconds: float = 0.0


def examine(group: str, name: str, folder: Path) -> Row:
    """Ask for each precision; what the folder keeps says how far it came."""
    torch.set_num_threads(1)
    row = Row(group, name, dict.fromkeys(PRECISIONS, "the process died while it was captured"))
    keep_rows([row], folder)
    try:
        for precision, answer in _answers(*_opened(group, name, folder), folder):
            row.answers[precision] = answer
            keep_rows([row], folder)
    except EnginecastError as error:
        row.answers = dict.fromkeys(PRECISIONS, one_line(f"not captured: {error.message}", 300))
    return row


def _opened(group: str, name: str, folder: Path) -> tuple[str, ModelOptions, Source | None]:
    """MODEL and its options, as the campaign of the group exports it."""
    if group == "vision":
        words = ENTRIES[name].options
        options = ModelOptions(dynamic=words[1::2])  # the only option that they have
        return f"vision.models:{name}", options, None
    source, _ = zoo.first_that_runs(zoo.Row(name), folder)
    model = source.name if name in CALLED else str(folder / "model")
    given = folder / zoo.INPUTS
    return model, ModelOptions(inputs=given if given.is_file() else None), source


def _answers(
    model: str, options: ModelOptions, source: Source | None, folder: Path
) -> Iterator[tuple[str, str]]:
    source = source or open_model(model, options)
    prepared = prepare(source, options, Steps())
    for precision in PRECISIONS:
        yield precision, "the process died while it was built"
        asked = ExportRequest(model, target=RTX.name, precision=precision, options=options)
        config = asked.resolve()
        program = structural_copy(prepared.captured.program)
        place = folder / precision
        place.mkdir(exist_ok=True)
        try:
            run_pipeline(build(config.pipeline), program, prepared.context)
            request = lowering_request(prepared, config, program, place)
            run_pipeline(build(config.lowering), program, prepared.context)
            ends = {
                size: (low, high if high <= LARGEST else LONGEST)
                for size, (low, high) in request.ranges.items()
            }
            target_of(config.target).lower(replace(request, ranges=ends))
        except EnginecastError as error:
            yield precision, reason(error)
            continue
        # What `inspect` says, with the library or without it, must not refuse what is built.
        network = ir.external_data.load_to_model(ir.load(place / NETWORK_FILE))
        found = [*(check_parsed(trt, network) or ()), *check_ready(network, ranges=ends)]
        yield precision, f"builds, but `inspect` refuses {found[0]}" if found else BUILDS


def reason(error: EnginecastError) -> str:
    """Why a network is not built: the first reason, without what all have in common."""
    said = re.sub(
        r"^.*?(cannot build this engine: |network: (\d+ violations?\s+)?)",
        "",
        error.message,
        flags=re.S,
    )
    return one_line(shortened(re.sub(r"; IBuilder::.*", "", said)), 300)
