"""Run an engine with OpenVINO on the CPU.

OpenVINO is free to compute in less than the file says: on CPUs that have bf16 it takes that for
fp32, it quantizes activations before packed weights, and for int64 it takes int32.  So every
setting that decides what is computed is given, and those that a CPU may lack are read back.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar, Self

import numpy as np

from enginecast.errors import (
    BundleError,
    EnginecastError,
    InputError,
    MissingError,
    UsageError,
    first_line,
)
from enginecast.installation import required
from enginecast.runtime.bundle.manifest import EngineRecord, Input, Manifest, Output
from enginecast.runtime.bundle.onnx_file import check_onnx, weight_files
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device.out_of_memory import lacks_memory
from enginecast.runtime.device.versions import numbers
from enginecast.runtime.sessions.session import Session
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.values.arrays import BFLOAT16, Array, from_ort, to_array, to_ort
from enginecast.runtime.values.device_tensor import DeviceTensor, Feed, shown_shapes

PROVIDER = "openvino-cpu"
MINIMUM = "openvino>=2026.4"
"""Oldest version that engines of this target are known to run right on."""

KEPT = 4
"""Sizes of which a session keeps the model that was compiled for them: each packs weights anew."""
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Of a call's inputs, by name."""

_TYPES = {
    **{"float32": "f32", "bfloat16": "bf16", "bool": "boolean"},
    **{
        name: f"{name[0]}{name.lstrip('uint')}"
        for name in ("uint8", "int8", "int16", "int32", "int64")
    },
}
"""OpenVINO's names of the dtypes that the target has."""
_COMPUTED = {"fp32": "f32", "bf16": "bf16"}
_SETTINGS = {
    "EXECUTION_MODE_HINT": "ACCURACY",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "CPU_DENORMALS_OPTIMIZATION": False,
    "NUM_STREAMS": 1,
    "PERFORMANCE_HINT": "LATENCY",
    "ENABLE_CPU_PINNING": False,  # engines of several processes would meet on the same cores
}


@dataclass
class _Compiled:
    """A compiled model, and the requests for it that no run has."""

    model: Any
    idle: list[Any] = field(default_factory=list)


class OpenVINOSession(Session):
    """A compiled model, or one for each of the last sizes.

    Every run has a request of its own, so that threads do not meet.
    """

    name = "openvino"
    runs_code = False
    providers: ClassVar = {"CPUExecutionProvider": PROVIDER}
    packages = ("openvino",)
    tunable = ("threads", "fixed_sizes")

    def __init__(
        self,
        openvino: Any,
        compiled: Any,
        record: EngineRecord,
        wide: frozenset[str],
        compile_for: Callable[[Shapes], Any] | None = None,
    ) -> None:
        """
        Args:
            compiled: for all sizes.
            wide: inputs of int64 whose range the manifest does not keep within int32.
            compile_for: compiles for the shapes of a call's inputs; None: `compiled` runs it.
        """
        self._openvino = openvino
        self._file = record.file
        self._wide = wide
        self._places = {
            name: place for place, port in enumerate(compiled.outputs) for name in port.names
        }
        self._whole = _Compiled(compiled)
        self._compile_for = compile_for
        self._of_sizes: OrderedDict[Shapes, _Compiled] = OrderedDict()
        self._changes_sizes = Lock()

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        record: EngineRecord,
        providers: Sequence[str],
        threads: int | None,
        *,
        cuda_graphs: bool = True,
        counts_ops: bool = False,
        settings: Settings = DEFAULT,
    ) -> Self:
        if providers[0] not in (PROVIDER, *cls.providers):
            raise UsageError(
                f"{providers[0]}: an OpenVINO engine runs on {PROVIDER}",
                hint="Use device='cpu' (--device cpu).",
            )
        openvino = require_openvino(record.file, record.minimum_runtime)
        wanted = _COMPUTED.get(record.precision)
        if wanted is None:
            raise BundleError(f"{record.file}: OpenVINO engines do not support {record.precision}")
        chosen = {
            **_SETTINGS,
            "INFERENCE_PRECISION_HINT": wanted,
            "INFERENCE_NUM_THREADS": threads or 0,
        }
        weights = weight_files(bundle, record.weights)
        check_onnx(bundle.read(record.file), record.file, weights)
        try:
            core = openvino.Core()
            model = core.read_model(bundle.folder / record.file)
            _require_signature(record.file, bundle.manifest, model)
            model.reshape(_shapes(openvino, bundle.manifest))
            _keep_order_of_ties(openvino, model)
            compiled = core.compile_model(model, "CPU", chosen)
            computes = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        except EnginecastError:
            raise
        except Exception as error:  # OpenVINO raises RuntimeError, and others of pybind11
            raise BundleError(f"{record.file}: OpenVINO refuses it: {said_by(error)}") from error
        if computes != wanted:
            raise MissingError(
                f"{record.file}: a {record.precision} engine, and OpenVINO computes in {computes}"
                " on this CPU",
                hint="Run it on a CPU with AVX512-BF16 or AMX, or export with --precision fp32.",
            )

        def compile_for(shapes: Shapes) -> Any:
            fixed = model.clone()
            fixed.reshape({name: openvino.PartialShape(shape) for name, shape in shapes})
            return core.compile_model(fixed, "CPU", chosen)

        inputs, int32 = bundle.manifest.inputs, np.iinfo(np.int32)
        varies = any(isinstance(d, str) for spec in inputs for d in spec.shape)
        own = compile_for if settings.fixed_sizes and varies else None
        narrow = {
            spec.name
            for spec in inputs
            if spec.minimum is not None and int32.min <= spec.minimum
            if spec.maximum is not None and spec.maximum <= int32.max
        }
        wide = {spec.name for spec in inputs if spec.dtype == "int64"} - narrow
        return cls(openvino, compiled, record, frozenset(wide), own)

    @property
    def provider(self) -> str:
        return PROVIDER

    def run(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, Any]:
        return {name: to_ort(found) for name, found in self.run_to_host(feeds, outputs).items()}

    def to_host(self, value: Any) -> Array:
        return from_ort(value)

    def run_to_host(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, Array]:
        given = {name: self._tensor(name, feed) for name, feed in feeds.items()}
        compiled = self._whole
        try:
            if self._compile_for is not None:  # what was made for the sizes of this call
                shapes = tuple((name, tuple(feed.shape)) for name, feed in sorted(feeds.items()))
                with self._changes_sizes:
                    if shapes not in self._of_sizes:
                        self._of_sizes[shapes] = _Compiled(self._compile_for(shapes))
                    self._of_sizes.move_to_end(shapes)
                    compiled = self._of_sizes[shapes]
                    if len(self._of_sizes) > KEPT:
                        self._of_sizes.popitem(last=False)
            request = (
                compiled.idle.pop() if compiled.idle else compiled.model.create_infer_request()
            )
        except Exception as error:  # as above
            raise self._failed(feeds, error) from error
        try:
            request.infer(given, share_inputs=True)
            # The next run writes into the same memory.
            return {name: self._copied(request, name) for name in outputs}
        except Exception as error:  # as above
            raise self._failed(feeds, error) from error
        finally:
            compiled.idle.append(request)

    def layers(self) -> tuple[str, ...]:
        # How many of each kind, in which precision.
        counted: Counter[tuple[str, str]] = Counter()
        for op in self._whole.model.get_runtime_model().get_ops():
            facts = op.get_rt_info()
            kind, low = (facts[key].astype(str) for key in ("layerType", "runtimePrecision"))
            if kind not in ("Const", "Input", "Output"):
                counted[kind, low] += 1
        return tuple(f"{kind} in {low}: {count}" for (kind, low), count in sorted(counted.items()))

    def _tensor(self, name: str, feed: Feed) -> Any:
        if isinstance(feed, DeviceTensor):
            feed.require_on(name, "cpu", 0)
            feed = to_array(feed)
        if name in self._wide:
            _require_int32(name, feed)
        if feed.dtype != BFLOAT16:
            return feed
        return self._openvino.Tensor(feed.view(np.uint16), feed.shape, self._openvino.Type.bf16)

    def _copied(self, request: Any, name: str) -> Array:
        tensor = request.get_output_tensor(self._places[name])
        is_bf16 = tensor.element_type == self._openvino.Type.bf16
        return np.array(tensor.data.view(BFLOAT16) if is_bf16 else tensor.data)

    def _failed(self, feeds: Mapping[str, Feed], error: Exception) -> EnginecastError:
        shapes = shown_shapes(feeds)
        if lacks_memory(error):
            return MissingError(
                f"{self._file}: too little memory for {shapes}", hint="Give smaller batches."
            )
        return InputError(f"{self._file}: failed on {shapes}: {said_by(error)}")


def require_openvino(why: str, minimum: str = MINIMUM) -> Any:
    """The module openvino, at least `minimum`; `why` is what needs it: an option, or a file."""
    with required("openvino", why, "openvino"):
        import openvino
    found = str(openvino.__version__).partition("-")[0]
    if numbers(found) < numbers(minimum.partition(">=")[2]):
        raise MissingError(
            f"{why} needs {minimum}, found openvino {found}",
            hint=f"pip install --upgrade '{minimum}'",
        )
    return openvino


def computes_bf16() -> bool:
    """Whether OpenVINO computes in bf16 on this CPU."""
    core = require_openvino("--precision bf16").Core()
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def said_by(error: BaseException) -> str:
    """OpenVINO's error message, without the lines of its own source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return told[-1] if told else first_line(error)


def _require_signature(file: str, manifest: Manifest, model: Any) -> None:
    """Refuse an engine file that takes or gives something else than the manifest says."""
    sides: tuple[tuple[str, Sequence[Input | Output], Any], ...] = (
        ("inputs", manifest.inputs, model.inputs),
        ("outputs", manifest.engine_outputs, model.outputs),
    )
    for side, declared, ports in sides:
        expected = {spec.name: _TYPES.get(spec.dtype, spec.dtype) for spec in declared}
        got = {name: port.element_type.to_string() for port in ports for name in port.names}
        if expected != {name: got.get(name) for name in expected} or len(ports) > len(expected):
            raise BundleError(f"{file}: {side}: the manifest says {expected}, the file has {got}")


def _shapes(openvino: Any, manifest: Manifest) -> dict[str, Any]:
    """The shapes of the inputs, with the bounds of sizes that vary."""
    symbols = manifest.symbols

    def size(dim: int | str) -> Any:
        bounds = symbols.get(dim, (0, -1)) if isinstance(dim, str) else (dim, dim)
        return openvino.Dimension(*bounds)  # -1: any

    return {
        spec.name: openvino.PartialShape([size(dim) for dim in spec.shape])
        for spec in manifest.inputs
    }


def _keep_order_of_ties(openvino: Any, model: Any) -> None:
    """Let equal elements stay in their order when they are sorted, as torch and ONNX Runtime do:
    ONNX has no word for that, and OpenVINO takes none for leave.
    """
    for node in model.get_ops():
        if node.get_type_name() != "TopK":
            continue
        facts = node.get_attributes()
        how = (facts[key] for key in ("axis", "mode", "sort", "index_element_type"))
        places = (node.input_value(place) for place in range(2))
        stable = openvino.opset11.topk(*places, *how, stable=True)
        for place, output in enumerate(node.outputs()):
            names = output.names
            output.replace(stable.output(place))
            stable.output(place).add_names(names)


def _require_int32(name: str, feed: Array) -> None:
    """OpenVINO computes int64 in int32."""
    info = np.iinfo(np.int32)
    if feed.size and not (info.min <= feed.min() and feed.max() <= info.max):
        raise InputError(
            f"input {name!r}: expected values within int32, which OpenVINO computes in, got"
            f" {feed.min()}..{feed.max()}"
        )
