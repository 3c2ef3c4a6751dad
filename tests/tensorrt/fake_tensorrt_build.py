"""The builder's side of the fake TensorRT: networks, configs, timing caches.

A fake: see tests/tensorrt/fake_tensorrt.py.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import onnx
from fake_tensorrt_base import (
    Overridden,
    Plan,
    Recorded,
    attribute,
    pack_cache,
    require_ready,
    unpack_cache,
)

FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN")
DTYPES = {
    "FLOAT": "FLOAT",
    "FLOAT16": "HALF",
    "BFLOAT16": "BF16",
    "FLOAT8E4M3FN": "FP8",
    "INT64": "INT64",
    "INT32": "INT32",
    "INT8": "INT8",
    "UINT8": "UINT8",
    "BOOL": "BOOL",
}
"""ONNX's name of a dtype -> TensorRT's."""


class ILogger(Overridden):
    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError("a derived class has to write the log")


class Logger(Overridden):
    """TensorRT's own: writes to stderr."""

    def __init__(self, min_severity: Any = None) -> None:
        self._ready = True
        self._least = min_severity

    def log(self, severity: Any, msg: str) -> None:
        if self._least is None or severity.value <= self._least.value:
            print(f"[fake TRT] {severity.name}: {msg}", file=sys.stderr)


class IErrorRecorder(Overridden):
    def clear(self) -> None:
        raise NotImplementedError

    def get_error_code(self, arg0: int) -> Any:
        raise NotImplementedError

    def get_error_desc(self, arg0: int) -> str:
        raise NotImplementedError

    def has_overflowed(self) -> bool:
        raise NotImplementedError

    def num_errors(self) -> int:
        raise NotImplementedError

    def report_error(self, arg0: Any, arg1: str) -> bool:
        raise NotImplementedError


class IProgressMonitor(Overridden):
    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        raise NotImplementedError

    def step_complete(self, phase_name: str, step: int) -> bool:
        raise NotImplementedError

    def phase_finish(self, phase_name: str) -> None:
        raise NotImplementedError


class IHostMemory(Recorded, bytes):
    """A buffer: bytes() and memoryview() read it."""

    @property
    def nbytes(self) -> int:
        return len(self)


class ITensor(Recorded):
    _name: str

    def _start(self, name: str, dtype: Any = None, shape: tuple[int, ...] = ()) -> None:
        self._name, self._dtype, self._shape = name, dtype, shape

    name = attribute("name")

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape


class ILayer(Recorded):
    """Any layer: what it was added with, and its outputs."""

    def _start(self, kind: str, arguments: dict[str, Any]) -> None:
        self._kind, self._arguments = kind, arguments
        self._output = self._fake._new("ITensor", f"{kind}_output", arguments.get("output_type"))

    name = attribute("name", "")

    @property
    def type(self) -> Any:
        """Of the kinds that somebody asks for."""
        return self._fake.LayerType.ATTENTION_OUTPUT if self._kind == "Attention" else None

    def get_output(self, index: int) -> Any:
        return self._output if index == 0 else None


ADDED = {
    "add_quantize": (
        "IQuantizeLayer",
        {"10.15": "input scale output_type?", "11.0": "input scale output_type"},
    ),
    "add_dequantize": (
        "IDequantizeLayer",
        {"10.15": "input scale output_type?", "11.0": "input scale output_type"},
    ),
    "add_cast": ("ICastLayer", dict.fromkeys(("10.15", "11.0"), "input to_type")),
    "add_elementwise": (
        "IElementWiseLayer",
        dict.fromkeys(("10.15", "11.0"), "input1 input2 op"),
    ),
    "add_gather_v2": ("IGatherLayer", dict.fromkeys(("10.15", "11.0"), "input indices mode")),
    "add_matrix_multiply": (
        "IMatrixMultiplyLayer",
        dict.fromkeys(("10.15", "11.0"), "input0 op0 input1 op1"),
    ),
    "add_reduce": ("IReduceLayer", dict.fromkeys(("10.15", "11.0"), "input op axes keep_dims")),
    "add_unary": ("IUnaryLayer", dict.fromkeys(("10.15", "11.0"), "input op")),
}
"""Layers that a network can be given: the class, and by version the parameters; ? is optional."""


def adder(name: str, version: str) -> Callable[..., Any]:
    """The method of a network that adds this layer, with the signature of this version."""
    kind, versions = ADDED[name]
    parameters = [
        inspect.Parameter(
            text.rstrip("?"),
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if text.endswith("?") else inspect.Parameter.empty,
        )
        for text in ("self", *versions[version].split())
    ]
    signature = inspect.Signature(parameters)

    def add(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        network = arguments.pop("self")
        layer = network._fake._new(kind, name, arguments)
        network._layers.append(layer)
        return layer

    add.__name__ = name
    vars(add)["__signature__"] = signature
    return add


class INetworkDefinition(Recorded):
    """Layers that were added one at a time, or the ONNX model that a parser read into it."""

    _model: onnx.ModelProto | None

    def _start(self, flags: int, logger: Any) -> None:
        self._flags, self._logger = flags, logger
        self._layers: list[Any] = []
        self._model = None
        self._parser: Any = None

    error_recorder = attribute("error_recorder")

    @property
    def num_inputs(self) -> int:
        return len(self._model.graph.input) if self._model else 0

    @property
    def num_outputs(self) -> int:
        return len(self._model.graph.output) if self._model else 0

    @property
    def num_layers(self) -> int:
        return len(self._model.graph.node) if self._model else len(self._layers)

    def get_layer(self, index: int) -> Any:
        """An ILayer, whatever it is: it is for the caller to say more of it."""
        if self._model is not None and not self._layers:
            kinds = [node.op_type for node in self._model.graph.node]
            self._layers += [self._fake._new("ILayer", kind, {}) for kind in kinds]
        return self._layers[index]

    def get_input(self, index: int) -> Any:
        return self._tensor(self._model.graph.input[index]) if self._model else None

    def get_output(self, index: int) -> Any:
        return self._tensor(self._model.graph.output[index]) if self._model else None

    def _tensor(self, value: onnx.ValueInfoProto) -> Any:
        return self._fake._new("ITensor", value.name, dtype_of(self._fake, value), dims_of(value))


def dtype_of(fake: Any, value: onnx.ValueInfoProto) -> Any:
    """TensorRT's dtype of an input or output of an ONNX graph."""
    name = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    return getattr(fake.DataType, DTYPES[name])


def dims_of(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Sizes, -1 for a symbol."""
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)


class IOptimizationProfile(Recorded):
    def _start(self) -> None:
        self._shapes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(
        self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None:
        rows = list(zip(min, opt, max, strict=False))
        ranks = {len(min), len(opt), len(max)}
        if len(ranks) > 1 or any(not 0 <= low <= best <= high for low, best, high in rows):
            raise ValueError(f"fake tensorrt: shapes of '{input}' are inconsistent")
        self._shapes[input] = [tuple(min), tuple(opt), tuple(max)]


class ITimingCache(Recorded):
    def _start(self, version: str, entries: dict[str, float]) -> None:
        self._version, self._entries = version, entries

    def serialize(self) -> Any:
        return self._fake._new("IHostMemory", pack_cache(self._version, self._entries))


class IBuilderConfig(Recorded):
    _timing_cache: Any

    def _start(self, logger: Any) -> None:
        self._logger = logger
        self._flags = {"TF32"}
        self._pools: dict[str, int] = {}
        self._profiles: list[Any] = []
        self._timing_cache = None

    builder_optimization_level = attribute("builder_optimization_level", 3)
    hardware_compatibility_level = attribute("hardware_compatibility_level")
    profiling_verbosity = attribute("profiling_verbosity")
    progress_monitor = attribute("progress_monitor")

    def set_flag(self, flag: Any) -> None:
        self._flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag.name)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._pools[pool.name] = pool_size

    def add_optimization_profile(self, profile: Any) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        data = bytes(serialized_timing_cache)
        if not data:
            return self._fake._new("ITimingCache", self._fake.__version__, {})
        try:
            return self._fake._new("ITimingCache", *unpack_cache(data))
        except ValueError as error:
            return self._report(str(error))

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        if cache._version != self._fake.__version__ and not ignore_mismatch:
            self._report(f"the timing cache was made by version {cache._version}")
            return False
        self._timing_cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return self._timing_cache


class Builder(Recorded):
    def __init__(self, logger: Any) -> None:
        self._logger = require_ready(logger, self._fake.ILogger)

    error_recorder = attribute("error_recorder")

    def create_network(self, flags: int = 0) -> Any:
        return self._fake._new("INetworkDefinition", int(flags), self._logger)

    def create_builder_config(self) -> Any:
        return self._fake._new("IBuilderConfig", self._logger)

    def create_optimization_profile(self) -> Any:
        return self._fake._new("IOptimizationProfile")

    def build_serialized_network(self, network: Any, config: Any) -> Any:
        failures = self._fake.failures
        if not self._reported(config):
            return None
        problem = failures.build or self._problem(network, config)
        if failures.build_silently:
            return None
        if problem:
            return self._report(problem)
        if config._timing_cache is not None:
            kinds = [n.op_type for n in network._model.graph.node] if network._model else []
            config._timing_cache._entries.update(dict.fromkeys(kinds, 1.0))
        return self._fake._new("IHostMemory", plan_of(self._fake, network._model, config).pack())

    def _reported(self, config: Any) -> bool:
        """Whether the progress monitor let all steps pass."""
        monitor, failures = config.progress_monitor, self._fake.failures
        if monitor is None:
            return True
        phases = (("Building Engine", None), ("Selecting tactics", "Building Engine"))
        passed = True
        for phase, parent in phases:
            monitor.phase_start(phase, parent, failures.steps)
        for step in range(failures.steps):
            failures.during_step(step)
            passed = monitor.step_complete("Selecting tactics", step)
            if not passed:
                break
        for phase, _ in reversed(phases):
            monitor.phase_finish(phase)
        return passed

    def _problem(self, network: Any, config: Any) -> str:
        """What of profile and network does not fit, as the real builder would find it."""
        if network._model is None:
            return ""
        if network._parser() is None:
            return "the parser, which owns the weights of the network, is gone"
        shapes = config._profiles[0]._shapes if config._profiles else {}
        for value in network._model.graph.input:
            dims = dims_of(value)
            if -1 not in dims:
                continue
            if value.name not in shapes:
                return f"network has dynamic input {value.name}, but no profile has been defined"
            if len(shapes[value.name][0]) != len(dims):
                return f"the profile of {value.name} has another rank than its {len(dims)}"
        return ""


def plan_of(fake: Any, model: onnx.ModelProto | None, config: Any = None) -> Plan:
    """The plan of a parsed network; the weights are left out when the config says so."""
    flags = sorted(config._flags) if config else []
    kept = onnx.ModelProto()
    if model is not None:
        kept.CopyFrom(model)
    stripped = _strip(kept) if "STRIP_PLAN" in flags else []
    level = config.hardware_compatibility_level if config else None
    return Plan(
        fake.__version__,
        kept.SerializeToString() if model is not None else b"",
        {
            name: shapes
            for p in (config._profiles if config else [])
            for name, shapes in p._shapes.items()
        },
        flags,
        stripped,
        bool(config and config.profiling_verbosity == fake.ProfilingVerbosity.DETAILED),
        {"hardware": level.name if level else "NONE", "pools": config._pools if config else {}},
    )


def _strip(model: onnx.ModelProto) -> list[str]:
    """Take the values of all weights of floats off; their names."""
    stripped = []
    for tensor in model.graph.initializer:
        if onnx.TensorProto.DataType.Name(tensor.data_type) in FLOATS:
            for name in ("raw_data", "float_data", "int32_data"):
                tensor.ClearField(name)
            stripped.append(tensor.name)
    return stripped
