"""Build a TensorRT engine with torch_tensorrt: the whole program, converted op by op.

The plan's inputs have the program's names.  Its outputs are called output0, output1 and so on
(torch_tensorrt: dynamo/conversion/_TRTInterpreter.py), in the program's order.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from enginecast.errors import EnginecastError, LoweringError, MissingError, UsageError, first_line
from enginecast.exporters.files import quiet
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.exporters.tensorrt.torch_converters import (
    ONNX_ROUTE,
    register_converters,
    scale_axis,
)
from enginecast.exporters.weights.file import check_dtypes
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.deferred_weights import deferred_weights
from enginecast.passes.ir.edit import (
    arguments,
    dtype_of,
    input_names,
    shape_of,
    weight_specs,
    with_weights,
)
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.source import call_place
from enginecast.runtime.bundle.manifest import ShapeRange
from enginecast.runtime.device.versions import short_version
from enginecast.runtime.sessions.tensorrt.versions import import_torch_tensorrt

WHY = "--target-option route=torch"
FP8 = torch.float8_e4m3fn
"""The one that TensorRT calls FP8."""
QUANTIZED = (own.quantize.default, own.dequantize.default, own.quantized_linear.default)
"""What converters of ours know."""
_NO_FORM = (own.dynamic_scale.default, own.blockwise_linear.default, own.quantize_blocks.default)
PHASE = "torch_tensorrt builds the engine"

_SHOWN = 5
"""How many ops a message names."""
_LOGGERS = ("torch_tensorrt", "torch_tensorrt.dynamo")


def plan_by_torch(
    order: LoweringRequest, trt: Any, profile: Sequence[ShapeRange], timing_cache: Path
) -> bytes:
    """A serialized engine of the whole program.

    Args:
        trt: the module tensorrt.
        profile: the shapes of each input; one that is left out has fixed ones.
        timing_cache: the file to read and to write.

    Raises:
        MissingError: torch_tensorrt is not installed, does not load, was made for another torch or
            TensorRT, or does not know a setting.
        UsageError: an option that it has no setting for.
        LoweringError: an op has no converter (named with module and source line), values are
            quantized in another way than TensorRT has, or the build failed.
    """
    tt = import_torch_tensorrt(
        WHY, torch=torch.__version__, tensorrt=trt.__version__, cuda=torch.version.cuda
    )
    settings = settings_for(tt.__version__, order.options, timing_cache)
    dynamo = import_module("torch_tensorrt.dynamo")
    check_settings(dynamo, tt.__version__, settings)
    check_dtypes(deferred_weights(order.program).values())
    program = with_weights(order.program)
    check_program(program)
    inputs = _inputs(tt, program, profile)
    with quiet(*_LOGGERS):
        conversion = import_module("torch_tensorrt.dynamo.conversion")
        utils = import_module("torch_tensorrt.dynamo.conversion.converter_utils")
        register_converters(trt, conversion, utils.get_trt_tensor)
        _require_convertible(
            tt.__version__, conversion, program, dynamo.CompilationSettings(**settings)
        )
    order.tell(PHASE, 0, 1)
    plan = _convert(tt.__version__, dynamo, program, inputs, settings)
    order.tell(PHASE, 1, 1)
    return plan


def check_program(program: ExportedProgram) -> None:
    """Look for what TensorRT has no layers for.

    Args:
        program: after the lowering passes.

    Raises:
        LoweringError: values are quantized in a way that TensorRT has no form for, or one value is
            several outputs.
    """
    names = program.graph_signature.user_outputs
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:  # torch_tensorrt marks a tensor as an output once, and counts on
        raise LoweringError(
            f"the value '{twice}' is {names.count(twice)} outputs, and torch_tensorrt gives it as"
            " one",
            hint=ONNX_ROUTE,
        )
    constants = frozenset(weight_specs(program))
    for node in all_nodes(program):
        _check_quantized(node, constants)


def _check_quantized(node: Node, constants: frozenset[str]) -> None:
    """Raise unless TensorRT has layers for what the node computes."""
    if node.target in _NO_FORM:
        raise _no_form(node, "scales that are computed while it runs, or scales of blocks")
    if node.target not in QUANTIZED:
        return
    if node.target is own.quantized_linear.default:
        x, x_scale, weight, weight_scale, *_ = arguments(node)
        values, scales = [x, weight], [(x_scale, x), (weight_scale, weight)]
    else:
        scaled, scale, *_ = arguments(node)
        values = [node if node.target is own.quantize.default else scaled]
        scales = [(scale, scaled)]
    for value in values:
        if dtype_of(value) != FP8:
            raise _no_form(node, str(dtype_of(value)).removeprefix("torch."), expected="fp8 e4m3fn")
    for scale, scaled in scales:
        if getattr(scale, "name", None) not in constants:
            raise _no_form(node, "a scale that is not a constant")
        if scale_axis(shape_of(scale), shape_of(scaled)) is None:
            raise _no_form(node, f"scales of shape {[*shape_of(scale)]}", expected="one dimension")
    if node.target is own.quantize.default and scale_axis(shape_of(arguments(node)[1]), ()) != -1:
        raise _no_form(node, "a scale for each row of activations", expected="one for all")


def _no_form(node: Node, got: str, *, expected: str = "scales that are constants") -> LoweringError:
    return LoweringError(
        f"TensorRT has no layer for {call_place(node)}: expected {expected}, got {got}",
        hint="Export with --precision fp8 for TensorRT, or quantize for another target.",
    )


def _folded(module: GraphModule, program: ExportedProgram) -> list[str]:
    """What became of quantized values in the module that a program was lowered to, in sentences."""
    said = []
    for op in QUANTIZED:
        before = sum(node.target is op for node in all_nodes(program))
        after = module.graph.find_nodes(op="call_function", target=op)
        if len(after) != before:
            said.append(f"of {before} calls of {op}, {len(after)} are left")
    for node in module.graph.find_nodes(op="call_function", target=own.quantized_linear.default):
        if dtype_of(node.args[2]) != FP8:
            said.append(f"the weight of {call_place(node)} is {dtype_of(node.args[2])}")
    return said


def _require_convertible(
    version: str, conversion: Any, program: ExportedProgram, settings: Any
) -> None:
    known = conversion.DYNAMO_CONVERTERS
    known.set_compilation_settings(settings)
    lowering = import_module("torch_tensorrt.dynamo.lowering")
    prepared = lowering.pre_export_lowering(program, settings)
    plain = prepared.run_decompositions(lowering.get_decompositions())
    module = lowering.post_lowering(plain.module(), settings)
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    places = list(dict.fromkeys(call_place(node) for node in calls if known.get(node) is None))
    if places:
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        raise LoweringError(
            f"torch_tensorrt {version} has no converter for {', '.join(places[:_SHOWN])}{more}",
            hint=ONNX_ROUTE,
        )
    lost = _folded(module, program)
    if lost:
        raise LoweringError(
            f"torch_tensorrt {version} computes quantized values beforehand: {'; '.join(lost)}",
            hint=ONNX_ROUTE,
        )


def _inputs(tt: Any, program: ExportedProgram, profile: Sequence[ShapeRange]) -> tuple[Any, ...]:
    """What is fed, in the program's order."""
    ranges = {shapes.name: shapes for shapes in profile}
    by_name = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    found = []
    for name in input_names(program):
        node = by_name[name]
        settings: dict[str, Any] = {"dtype": dtype_of(node), "name": name}
        shapes = ranges.get(name)
        if shapes is not None and shapes.least != shapes.greatest:
            settings["min_shape"], settings["max_shape"] = shapes.least, shapes.greatest
            settings["opt_shape"] = shapes.optimal
        else:
            sizes = shape_of(node) if shapes is None else shapes.least
            if not all(isinstance(size, int) for size in sizes):
                raise LoweringError(f"input '{name}': expected a range for its shape, got none")
            settings["shape"] = sizes
        found.append(tt.Input(**settings))
    return tuple(found)


def _convert(
    version: str,
    dynamo: Any,
    program: ExportedProgram,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
) -> bytes:
    convert = dynamo.convert_exported_program_to_serialized_trt_engine
    try:
        with quiet(*_LOGGERS), torch.no_grad():
            plan = convert(program, arg_inputs=inputs, **settings)
    except Exception as error:  # it raises what its many parts raise
        if (own_error := _own(error)) is not None:
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
    return first_line(error)[:300]


_EXPLICIT: Mapping[str, Any] = {"use_explicit_typing": True}
_OF_VERSION: Mapping[str, Mapping[str, Any]] = {"2.11": _EXPLICIT, "2.12": _EXPLICIT, "2.13": {}}


def settings_for(version: str, options: TensorRTOptions, timing_cache: Path) -> dict[str, Any]:
    """Keywords of `convert_exported_program_to_serialized_trt_engine`, without the inputs.

    Args:
        version: of torch_tensorrt.
        timing_cache: a file, which may not exist; by default it would be one in the folder for
            temporary files that everybody shares.

    Raises:
        UsageError: an option that torch_tensorrt has no setting for.
    """
    if options.strip_weights:
        raise UsageError(
            "--target-option route=torch: weights stay in the plan; expected the route 'onnx' for a"
            " plan without them, which is filled from its ONNX file"
        )
    if options.hardware == "same-capability":
        raise UsageError(
            "--target-option route=torch: torch_tensorrt knows the hardware compatibility 'ampere+'"
            " or none, got 'same-capability'",
            hint="Use --target-option route=onnx.",
        )
    return {
        "attn_bias_is_causal": False,
        "cache_built_engines": False,
        "decompose_attention": False,
        "disable_tf32": True,
        "enable_experimental_decompositions": False,
        "hardware_compatible": options.hardware == "ampere+",
        "immutable_weights": not options.refit,
        "optimization_level": options.level,
        "require_full_compilation": True,
        "reuse_cached_engines": False,
        "timing_cache_path": str(timing_cache),
        "truncate_double": False,
        "use_fp32_acc": False,
        "version_compatible": options.version_compatible,
        "workspace_size": options.workspace or 0,
        **_OF_VERSION[short_version(version)],
    }


def check_settings(dynamo: Any, version: str, settings: Mapping[str, Any]) -> None:
    """Look every keyword up in the function that gets it, and in the settings that it makes.

    Args:
        dynamo: the module torch_tensorrt.dynamo.

    Raises:
        MissingError: this version does not know one, and would ignore it.
    """
    convert = inspect.signature(dynamo.convert_exported_program_to_serialized_trt_engine)
    taken = set(convert.parameters)
    kept = {field.name for field in fields(dynamo.CompilationSettings)}
    unknown = sorted(name for name in settings if name not in taken & kept)
    if unknown:
        raise MissingError(
            f"torch_tensorrt {version} does not know the setting"
            f"{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}, and would ignore"
            f" {'them' if len(unknown) > 1 else 'it'}",
            hint="Use --target-option route=onnx.",
        )
