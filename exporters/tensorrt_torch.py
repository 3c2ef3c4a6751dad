"""The route to TensorRT by torch_tensorrt: the whole program, converted op by op.

The plan's inputs have the program's names.  Its outputs are called output0, output1 and so on
(torch_tensorrt: dynamo/conversion/_TRTInterpreter.py), in the program's order.
"""

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from enginecast.errors import EnginecastError, LoweringError
from enginecast.exporters.onnx import input_names
from enginecast.exporters.order import Order
from enginecast.exporters.tensorrt_converters import register_converters
from enginecast.exporters.tensorrt_options import TensorRTOptions
from enginecast.exporters.tensorrt_program import (
    FP8,
    ONNX_ROUTE,
    QUANTISED,
    Prepared,
    prepare_program,
)
from enginecast.exporters.tensorrt_settings import check_settings, settings_for
from enginecast.passes.graph_edit import dtype_of, shape_of
from enginecast.passes.purity import own
from enginecast.passes.source import call_place
from enginecast.passes.structure import all_nodes
from enginecast.runtime.manifest import ShapeRange
from enginecast.runtime.tensorrt_versions import import_torch_tensorrt

WHY = "--trt-route torch"
PHASE = "torch_tensorrt builds the engine"

_SHOWN = 5
"""How many ops a message names."""
_LOGGERS = ("torch_tensorrt", "torch_tensorrt.dynamo")


def plan_by_torch(
    order: Order,
    trt: Any,
    profile: Sequence[ShapeRange],
    options: TensorRTOptions,
    *,
    timing_cache: Path | None = None,
) -> bytes:
    """A serialised engine of the whole program.

    Args:
        trt: the module tensorrt.
        profile: the shapes of each input; one that is left out has fixed ones.
        timing_cache: the file to read and to write; None: none is kept.

    Raises:
        MissingError: torch_tensorrt is not installed, does not load, was made for another torch or
            TensorRT, or does not know a setting.
        UsageError: an option that it has no setting for.
        LoweringError: an op has no converter (named with module and source line), values are
            quantised in another way than TensorRT has, or the build failed.
    """
    tt = import_torch_tensorrt(
        WHY, torch=torch.__version__, tensorrt=trt.__version__, cuda=torch.version.cuda
    )
    with _folder_of(timing_cache) as cache:
        settings = settings_for(tt.__version__, options, cache)
        dynamo = import_module("torch_tensorrt.dynamo")
        check_settings(dynamo, tt.__version__, settings)
        prepared = prepare_program(order.program)
        for note in prepared.notes:
            order.say(note)
        inputs = _inputs(tt, prepared.program, profile)
        with quiet():
            conversion = import_module("torch_tensorrt.dynamo.conversion")
            utils = import_module("torch_tensorrt.dynamo.conversion.converter_utils")
            register_converters(trt, conversion, utils.get_trt_tensor)
            _require_convertible(
                tt.__version__, conversion, prepared, dynamo.CompilationSettings(**settings)
            )
        order.tell(PHASE, 0, 1)
        plan = _convert(tt.__version__, dynamo, prepared.program, inputs, settings)
        order.tell(PHASE, 1, 1)
    return plan


def lowered(program: ExportedProgram, settings: Any) -> GraphModule:
    """What torch_tensorrt makes of a program before it converts its ops one by one."""
    lowering = import_module("torch_tensorrt.dynamo.lowering")
    program = lowering.pre_export_lowering(program, settings)
    plain = program.run_decompositions(lowering.get_decompositions())
    found: GraphModule = lowering.post_lowering(plain.module(), settings)
    return found


def unconvertible(module: GraphModule, conversion: Any) -> list[Node]:
    """The calls that no converter is registered for, with the shapes and arguments that they have.

    Args:
        module: lowered.
        conversion: torch_tensorrt.dynamo.conversion.
    """
    known = conversion.DYNAMO_CONVERTERS
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    return [node for node in calls if known.get(node) is None]


def folded(module: GraphModule, program: ExportedProgram) -> list[str]:
    """What has become of quantised values that were computed beforehand, as sentences.

    Args:
        module: the program as it was lowered.
    """
    said = []
    for op in QUANTISED:
        before = sum(node.target is op for node in all_nodes(program))
        after = module.graph.find_nodes(op="call_function", target=op)
        if len(after) != before:
            said.append(f"of {before} calls of {op}, {len(after)} are left")
    for node in module.graph.find_nodes(op="call_function", target=own.quantized_linear.default):
        if dtype_of(node.args[2]) != FP8:
            said.append(f"the weight of {call_place(node)} is {dtype_of(node.args[2])}")
    return said


def _require_convertible(version: str, conversion: Any, prepared: Prepared, settings: Any) -> None:
    conversion.DYNAMO_CONVERTERS.set_compilation_settings(settings)
    module = lowered(prepared.program, settings)
    places = list(dict.fromkeys(call_place(node) for node in unconvertible(module, conversion)))
    if places:
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        raise LoweringError(
            f"torch_tensorrt {version} has no converter for {', '.join(places[:_SHOWN])}{more}",
            hint=ONNX_ROUTE,
        )
    lost = folded(module, prepared.program)
    if lost:
        raise LoweringError(
            f"torch_tensorrt {version} computes quantised values beforehand: {'; '.join(lost)}",
            hint=ONNX_ROUTE,
        )


def _inputs(tt: Any, program: ExportedProgram, profile: Sequence[ShapeRange]) -> tuple[Any, ...]:
    """What is fed, in the program's order."""
    ranges = {shapes.name: shapes for shapes in profile}
    by_name = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    found = []
    for name in input_names(program):
        node = by_name[name]
        settings = {"dtype": dtype_of(node), "name": name}
        shapes = ranges.get(name)
        if shapes is None or shapes.least == shapes.greatest:
            found.append(tt.Input(shape=_fixed(node, shapes), **settings))
            continue
        found.append(
            tt.Input(
                min_shape=shapes.least,
                opt_shape=shapes.optimal,
                max_shape=shapes.greatest,
                **settings,
            )
        )
    return tuple(found)


def _fixed(node: Node, shapes: ShapeRange | None) -> tuple[int, ...]:
    if shapes is not None:
        return shapes.least
    sizes = tuple(shape_of(node))
    if not all(isinstance(size, int) for size in sizes):
        raise LoweringError(f"input '{node.name}': expected a range for its shape, got none")
    return sizes


def _convert(
    version: str,
    dynamo: Any,
    program: ExportedProgram,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
) -> bytes:
    convert = dynamo.convert_exported_program_to_serialized_trt_engine
    try:
        with quiet(), torch.no_grad():
            plan = convert(program, arg_inputs=inputs, **settings)
    except Exception as error:  # it raises what its many parts raise
        own_error = _own(error)
        if own_error is not None:
            raise own_error from error
        raise LoweringError(
            f"torch_tensorrt {version} cannot build this program: {_first_line(error)}",
            hint=ONNX_ROUTE,
        ) from error
    if not plan:
        raise LoweringError(f"torch_tensorrt {version} built no engine", hint=ONNX_ROUTE)
    return bytes(plan)


def _own(error: BaseException) -> EnginecastError | None:
    """An error of ours that torch_tensorrt wrapped."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, EnginecastError):
        found = found.__cause__ or found.__context__
    return found


def _first_line(error: BaseException) -> str:
    """What was said first: torch_tensorrt wraps with a print of the whole graph."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def _folder_of(timing_cache: Path | None) -> Iterator[Path]:
    if timing_cache is not None:
        yield timing_cache
        return
    with tempfile.TemporaryDirectory(prefix="enginecast-") as scratch:
        yield Path(scratch) / "timing.cache"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch_tensorrt logs what it raises as well, and warns of what its users cannot change."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
