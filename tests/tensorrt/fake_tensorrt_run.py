"""The runtime's side of the fake TensorRT: engines, contexts, the inspector, refitting.

Execution is ONNX Runtime's CPU provider on the ONNX model inside of the plan; addresses are those
of memory that this process can read.  A fake: see tests/tensorrt/fake_tensorrt.py.
"""

import ctypes
import json
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from fake_tensorrt_base import Plan, Recorded, attribute, require_ready, unpack_plan
from fake_tensorrt_build import dims_of, dtype_of

FORMATS = {"FLOAT": "FP32", "HALF": "FP16", "BF16": "BF16", "FP8": "FP8", "BOOL": "Bool"}
"""As the inspector writes a dtype; others as they are called."""


class Runtime(Recorded):
    def __init__(self, logger: Any) -> None:
        self._logger = require_ready(logger, self._fake.ILogger)

    error_recorder = attribute("error_recorder")
    engine_host_code_allowed = attribute("engine_host_code_allowed", False)

    def deserialize_cuda_engine(self, serialized_engine: Any) -> Any:
        problem = self._fake.failures.deserialize
        if problem:
            return self._report(problem)
        try:
            plan = unpack_plan(bytes(memoryview(serialized_engine)))
        except ValueError as error:
            return self._report(f"IRuntime::deserializeCudaEngine: {error}")
        problem = self._misfit(plan)
        if problem:
            return self._report(problem)
        return self._fake._new("ICudaEngine", plan, self._logger, self._error_recorder_of())

    def _error_recorder_of(self) -> Any:
        return getattr(self, "_error_recorder", None)

    def _misfit(self, plan: Plan) -> str:
        if "VERSION_COMPATIBLE" in plan.flags:
            if not self.engine_host_code_allowed:
                return "the plan holds host code, and engine_host_code_allowed is not set"
            return ""
        if plan.version != self._fake.__version__:
            return f"the plan is of version {plan.version}, expecting {self._fake.__version__}"
        return ""


class ICudaEngine(Recorded):
    def _start(self, plan: Plan, logger: Any, recorder: Any) -> None:
        self._plan, self._logger, self._error_recorder = plan, logger, recorder
        self._weights: dict[str, onnx.TensorProto] = {}
        self._shapes: dict[tuple[tuple[int, ...], ...], dict[str, tuple[int, ...]]] = {}

    error_recorder = attribute("error_recorder")

    @cached_property
    def _model(self) -> onnx.ModelProto:
        return onnx.load_from_string(self._plan.network)

    @cached_property
    def _values(self) -> dict[str, onnx.ValueInfoProto]:
        graph = self._model.graph
        return {value.name: value for value in (*graph.input, *graph.output)}

    @cached_property
    def _inputs(self) -> list[str]:
        return [value.name for value in self._model.graph.input]

    @property
    def num_io_tensors(self) -> int:
        return len(self._values)

    @property
    def num_layers(self) -> int:
        return len(self._model.graph.node)

    @property
    def num_optimization_profiles(self) -> int:
        return 1

    @property
    def device_memory_size_v2(self) -> int:
        return 4096

    def get_tensor_name(self, index: int) -> str:
        return list(self._values)[index]

    def get_tensor_mode(self, name: str) -> Any:
        mode = self._fake.TensorIOMode
        return mode.INPUT if name in self._inputs else mode.OUTPUT

    @property
    def refittable(self) -> bool:
        return bool({"REFIT", "REFIT_IDENTICAL"} & set(self._plan.flags))

    def get_engine_stat(self, stat: Any) -> int:
        """Bytes of weights; of those that were left out, -1 when none were."""
        total = sum(prod(tensor.dims) for tensor in self._model.graph.initializer)
        return total if "STRIPPED" not in stat.name or self._plan.stripped else -1

    def get_tensor_location(self, name: str) -> Any:
        return self._fake.TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> Any:
        return dtype_of(self._fake, self._values[name])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return dims_of(self._values[name])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        if profile_index != 0:
            self._report(f"there is no profile {profile_index}")
            return [(), (), ()]
        return [tuple(shape) for shape in self._allowed(name)]

    def create_execution_context(self) -> Any:
        return self._fake._new("IExecutionContext", self)

    def create_engine_inspector(self) -> Any:
        return self._fake._new("EngineInspector", self)

    def _allowed(self, name: str) -> Sequence[Sequence[int]]:
        fixed = dims_of(self._values[name])
        return self._plan.profile.get(name, [fixed, fixed, fixed])

    @property
    def _missing(self) -> list[str]:
        return [name for name in self._plan.stripped if name not in self._weights]

    def _session(self) -> onnxruntime.InferenceSession:
        if "_made" not in self.__dict__:
            object.__setattr__(self, "_made", _session_of(self._filled()))
        return self.__dict__["_made"]

    def _filled(self) -> bytes:
        """The ONNX model with the weights that it was refitted with."""
        for tensor in self._model.graph.initializer:
            if tensor.name in self._weights:
                tensor.CopyFrom(self._weights[tensor.name])
        data: bytes = self._model.SerializeToString()
        return data

    def _refit(self, weights: dict[str, onnx.TensorProto]) -> None:
        self._weights.update(weights)
        self.__dict__.pop("_made", None)


def _session_of(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model,
        options,
        providers=["CPUExecutionProvider"],
        # It makes integer products of fp8, which ONNX Runtime then refuses.
        disabled_optimizers=["QDQSelectorActionTransformer"],
    )


class IExecutionContext(Recorded):
    def _start(self, engine: ICudaEngine) -> None:
        self._engine, self._logger = engine, engine._logger
        self._error_recorder = engine._error_recorder
        self._addresses: dict[str, int] = {}
        fixed = {name: dims_of(engine._values[name]) for name in engine._inputs}
        self._shapes = {name: dims for name, dims in fixed.items() if -1 not in dims}

    error_recorder = attribute("error_recorder")

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        if name not in self._engine._inputs:
            self._report(f"setInputShape: there is no input {name}")
            return False
        least, _, greatest = self._engine._allowed(name)
        rows = zip(least, shape, greatest, strict=False)
        if len(shape) != len(least) or any(not low <= size <= high for low, size, high in rows):
            self._report(
                f"setInputShape: {name} {tuple(shape)} is not within {least} and {greatest}"
            )
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._values:
            self._report(f"setTensorAddress: there is no tensor {name}")
            return False
        self._addresses[name] = int(memory)
        return True

    def infer_shapes(self) -> list[str]:
        return self._unshaped()

    def _unshaped(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._engine._inputs:
            return self._shapes.get(name, dims_of(self._engine._values[name]))
        fixed = dims_of(self._engine._values[name])
        if -1 not in fixed or self._unshaped():
            return fixed
        return self._output_shapes()[name]

    def _output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of a run with zeros: shapes of what is lowered here follow from shapes alone."""
        key = tuple(self._shapes[name] for name in self._engine._inputs)
        known = self._engine._shapes
        if key not in known:
            feeds = {
                name: np.zeros(self._shapes[name], _array_dtype(self._engine._values[name]))
                for name in self._engine._inputs
            }
            known[key] = {name: array.shape for name, array in self._run(feeds).items()}
        return known[key]

    def execute_async_v3(self, stream_handle: int) -> bool:
        problem = self._fake.failures.execute or self._unready()
        if problem:
            self._report(problem)
            return False
        feeds = {
            name: _read(self._addresses[name], self._shapes[name], self._engine._values[name])
            for name in self._engine._inputs
        }
        for name, array in self._run(feeds).items():
            written = np.ascontiguousarray(array)
            ctypes.memmove(self._addresses[name], written.ctypes.data, written.nbytes)
        return True

    def _unready(self) -> str:
        engine = self._engine
        lacking = self._unshaped() + [n for n in engine._values if n not in self._addresses]
        if lacking:
            return f"enqueueV3: shape or address of {', '.join(lacking)} was not set"
        return f"enqueueV3: {len(engine._missing)} weights are missing" if engine._missing else ""

    def _run(self, feeds: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        names = [value.name for value in self._engine._model.graph.output]
        for name in names:
            _array_dtype(self._engine._values[name])
        found = self._engine._session().run(names, feeds)
        return dict(zip(names, map(np.asarray, found), strict=True))


def _array_dtype(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(
        onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    )
    if dtype == ml_dtypes.bfloat16:
        raise NotImplementedError(
            f"fake tensorrt: '{value.name}' is bf16, which ONNX Runtime's CPU provider cannot run"
        )
    return dtype


def _read(address: int, shape: tuple[int, ...], value: onnx.ValueInfoProto) -> np.ndarray[Any, Any]:
    dtype = _array_dtype(value)
    data = ctypes.string_at(address, prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


class EngineInspector(Recorded):
    def _start(self, engine: ICudaEngine) -> None:
        self._engine = engine

    def get_engine_information(self, format: Any) -> str:
        """One layer for each node of the ONNX graph: a real builder fuses them."""
        engine = self._engine
        nodes = engine._model.graph.node
        layers: list[Any] = [node.name or node.op_type for node in nodes]
        if engine._plan.detailed:
            types = _value_dtypes(engine)
            layers = [_layer(index, node, types) for index, node in enumerate(nodes)]
        return json.dumps({"Layers": layers, "Bindings": list(engine._values)})


def _value_dtypes(engine: ICudaEngine) -> dict[str, str]:
    known = [*engine._values.values(), *engine._model.graph.value_info]
    return {value.name: dtype_of(engine._fake, value).name for value in known}


def _layer(index: int, node: onnx.NodeProto, types: dict[str, str]) -> dict[str, Any]:
    def described(name: str) -> dict[str, Any]:
        dtype = types.get(name, "FLOAT")
        text = f"Row major linear {FORMATS.get(dtype, dtype.title())} format"
        return {"Name": name, "Location": "Device", "Dimensions": [], "Format/Datatype": text}

    return {
        "Name": node.name or f"{node.op_type}_{index}",
        "LayerType": "gemm" if node.op_type in ("MatMul", "Gemm") else "kgen",
        "Inputs": [described(name) for name in node.input if name],
        "Outputs": [described(name) for name in node.output],
        "TacticName": f"fake_{node.op_type.lower()}",
        "StreamId": 0,
        "Metadata": f"[ONNX Layer: {node.name}]",
    }


class Refitter(Recorded):
    def __init__(self, engine: Any, logger: Any) -> None:
        if not {"REFIT", "REFIT_IDENTICAL"} & set(engine._plan.flags):
            raise TypeError("fake tensorrt: factory function returned nullptr")  # as pybind11 says
        self._engine, self._logger = engine, require_ready(logger, self._fake.ILogger)
        self._given: dict[str, onnx.TensorProto] = {}

    error_recorder = attribute("error_recorder")

    def get_missing_weights(self) -> list[str]:
        return self._missing()

    def _missing(self) -> list[str]:
        return [name for name in self._engine._missing if name not in self._given]

    def refit_cuda_engine(self) -> bool:
        if self._missing():
            self._report(f"refit: weights are missing: {', '.join(self._missing())}")
            return False
        self._engine._refit(self._given)
        return True
