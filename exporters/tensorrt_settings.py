"""What torch_tensorrt is asked for, in the words of the version that is here.

Up to 2.12 it has `use_explicit_typing` beside `enabled_precisions`, of which the default alone goes
with it; 2.13 has neither: dynamo/_compiler.py of its wheels.  All of them take any other keyword as
well, and ignore it: so every one is looked for first.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from enginecast.errors import MissingError, UsageError
from enginecast.exporters.tensorrt_options import TensorRTOptions
from enginecast.runtime.tensorrt_library import short_version

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
            "--trt-route torch: weights stay in the plan; expected the route 'onnx' for a plan"
            " without them, which is filled from its ONNX file"
        )
    if options.hardware == "same-capability":
        raise UsageError(
            "--trt-route torch: torch_tensorrt knows the hardware compatibility 'ampere+' or none,"
            " got 'same-capability'",
            hint="Use --trt-route onnx.",
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
    taken = {
        name
        for name, parameter in convert.parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    kept = {field.name for field in fields(dynamo.CompilationSettings)}
    unknown = sorted(name for name in settings if name not in taken & kept)
    if unknown:
        raise MissingError(
            f"torch_tensorrt {version} does not know the setting"
            f"{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}, and would ignore"
            f" {'them' if len(unknown) > 1 else 'it'}",
            hint="Use --trt-route onnx.",
        )
