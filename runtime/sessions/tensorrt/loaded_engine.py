"""A loaded TensorRT engine file: the engine, and its input and output tensors."""

import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from enginecast.errors import BundleError, MissingError
from enginecast.runtime.bundle.manifest import EngineRecord, Input, Manifest, Output, ShapeRange
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger, error_recorder

_DTYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FLOAT": "float32",
}
"""tensorrt.DataType -> the manifest's name; others are not at the border of an engine."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of an engine."""

    name: str
    """As the manifest calls it."""
    binding: str
    """As the engine calls it."""
    dtype: str
    """As the manifest calls it."""
    shape: tuple[int, ...]
    """-1 where it varies."""


@dataclass(frozen=True, eq=False)
class LoadedEngine:
    """An engine that agrees with the manifest."""

    trt: Any
    """The module."""
    engine: Any
    file: str
    inputs: tuple[Tensor, ...]
    """In the manifest's order."""
    outputs: tuple[Tensor, ...]
    profile: Mapping[str, ShapeRange]
    messages: Messages
    """What the engine reports outside of runs."""
    keep: tuple[Any, ...]
    """What must live as long as the engine, which calls it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of what is asked of the engine itself."""

    def range_of(self, name: str) -> str:
        """The shapes that an input may have, for messages: "[1, 1]..[8, 512]"."""
        if name in self.profile:
            found = self.profile[name]
            return f"{list(found.least)}..{list(found.greatest)}"
        return str(next([*one.shape] for one in self.inputs if one.name == name))


def load_engine(
    trt: Any, path: Path, record: EngineRecord, manifest: Manifest, network: Path | None
) -> LoadedEngine:
    """Deserialize an engine, fill in weights that it lacks, and compare it with the manifest.

    Args:
        trt: the module tensorrt, which fits what the record requires.
        path: of the engine; its digest was checked, for it is code.
        network: the ONNX file that an engine without weights is filled from; None: it holds them.

    Raises:
        BundleError: TensorRT refuses the engine, it takes or gives something else than the manifest
            says, or weights are missing.
        MissingError: TensorRT does not start here.
    """
    messages = Messages()
    logger, recorder = error_logger(trt, messages), error_recorder(trt, messages)
    try:
        runtime = trt.Runtime(logger)
    except (TypeError, RuntimeError) as error:  # pybind11: "factory function returned nullptr"
        said = messages.take() if len(messages) else str(error)
        raise MissingError(
            f"TensorRT {trt.__version__} cannot create a runtime: {said}",
            hint="It needs a GPU and a driver for its CUDA; see `enginecast doctor`.",
        ) from error
    runtime.error_recorder = recorder
    # A version-compatible engine brings the runtime of its version along, which is a library.
    runtime.engine_host_code_allowed = record.requires.get("version_compatible") == "yes"
    engine = None
    if path.stat().st_size:  # it can take gigabytes: it is mapped, not read
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise BundleError(
            f"{record.file}: TensorRT refuses the plan: {messages.take()}",
            hint="Export the model again on this machine.",
        )
    if network is not None:
        _refit(trt, engine, logger, record, network)
    elif engine.get_engine_stat(trt.EngineStat.STRIPPED_WEIGHTS_SIZE) > 0:
        raise BundleError(
            f"{record.file}: the plan holds no weights, and the manifest names no network to fill"
            " it from",
            hint="Export the model again.",
        )
    found = _tensors(trt, engine, record.file)
    inputs = _agreed(record.file, "inputs", manifest.inputs, found[trt.TensorIOMode.INPUT.name])
    declared, given = manifest.engine_outputs, found[trt.TensorIOMode.OUTPUT.name]
    # An engine of torch_tensorrt calls its outputs output0, output1 and so on, in order
    # (torch_tensorrt 2.13, dynamo/conversion/_TRTInterpreter.py).
    by_number = {f"output{index}": one.name for index, one in enumerate(declared)}
    bindings = {one.binding for one in given}
    if bindings == by_number.keys() and bindings != set(by_number.values()):
        given = [replace(one, name=by_number[one.binding]) for one in given]
    outputs = _agreed(record.file, "outputs", declared, given)
    profile = {one.name: one for one in record.profile}
    _require_profile(engine, record.file, inputs, profile)
    keep = (runtime, recorder, logger)
    return LoadedEngine(trt, engine, record.file, inputs, outputs, profile, messages, keep)


def _refit(trt: Any, engine: Any, logger: Any, record: EngineRecord, network: Path) -> None:
    """Fill in the weights of the ONNX file, whose own are in the file beside it."""
    if not engine.refittable:
        raise BundleError(
            f"{record.file}: expected a plan whose weights can be filled in, as the manifest says,"
            " and this one's cannot",
            hint="Export the model again.",
        )
    messages = Messages()
    recorder = error_recorder(trt, messages)
    refitter = trt.Refitter(engine, logger)
    refitter.error_recorder = recorder
    parser = trt.OnnxParserRefitter(refitter, logger)
    read = parser.refit_from_file(str(network))
    missing = [name or "one without a name" for name in refitter.get_missing_weights()]
    if read and not missing and refitter.refit_cuda_engine():
        return
    said = [parser.get_error(index).desc() for index in range(parser.num_errors)]
    if missing:
        said.append(f"{len(missing)} weights are missing: {', '.join(missing[:5])}")
    raise BundleError(
        f"{record.file}: TensorRT cannot fill in the weights of {record.network}:"
        f" {'; '.join(said) or messages.take()}",
        hint="Export the model again.",
    )


def _tensors(trt: Any, engine: Any, file: str) -> dict[str, list[Tensor]]:
    """What the engine takes and gives, by the name of its TensorIOMode."""
    found: dict[str, list[Tensor]] = {
        trt.TensorIOMode.INPUT.name: [],
        trt.TensorIOMode.OUTPUT.name: [],
    }
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise BundleError(
                f"{file}: {name!r} is a shape tensor in CPU memory, which is not supported",
                hint="Export with --target onnxruntime.",
            )
        kind = engine.get_tensor_dtype(name).name
        dtype = _DTYPES.get(kind, kind)
        shape = tuple(engine.get_tensor_shape(name))
        found[engine.get_tensor_mode(name).name].append(Tensor(name, name, dtype, shape))
    return found


def _agreed(
    file: str, field: str, declared: Sequence[Input | Output], actual: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The tensors in the order of the manifest: names, dtypes, ranks and sizes must be its."""
    by_name = {one.name: one for one in actual}
    expected = {one.name: f"{one.dtype} {_shown(one.shape)}" for one in declared}
    got = {name: f"{one.dtype} {_shown(one.shape)}" for name, one in by_name.items()}
    if expected.keys() != got.keys():
        raise BundleError(
            f"{file}: {field}: the manifest says {', '.join(sorted(expected))}, the plan has"
            f" {', '.join(sorted(got))}"
        )
    for one in declared:
        found = by_name[one.name]
        # A size that varies in the manifest may be fixed in the engine: one range of one size.
        fits = len(one.shape) == len(found.shape) and all(
            isinstance(size, str) or actual in (size, -1)
            for size, actual in zip(one.shape, found.shape, strict=True)
        )
        if found.dtype != one.dtype or not fits:
            raise BundleError(
                f"{file}: {field}: the manifest says {one.name} {expected[one.name]}, the plan has"
                f" {got[one.name]}"
            )
    return tuple(by_name[one.name] for one in declared)


def _require_profile(
    engine: Any, file: str, inputs: Sequence[Tensor], profile: Mapping[str, ShapeRange]
) -> None:
    """The one profile of the engine must be what the manifest says."""
    if engine.num_optimization_profiles != 1:
        raise BundleError(
            f"{file}: expected a plan of one profile, got {engine.num_optimization_profiles}"
        )
    unknown = sorted(profile.keys() - {one.name for one in inputs})
    if unknown:
        raise BundleError(
            f"{file}: the manifest has a profile of {unknown[0]!r}, which is not an input"
        )
    for tensor in inputs:
        if -1 in tensor.shape:
            built = engine.get_tensor_profile_shape(tensor.binding, 0)
            found = tuple(tuple(shape) for shape in built)
        else:
            found = (tensor.shape,) * 3
        said = profile.get(tensor.name)
        # A shape that never varies needs no range.
        wanted = (said.least, said.optimal, said.greatest) if said else (tensor.shape,) * 3
        if found != wanted:
            raise BundleError(
                f"{file}: input {tensor.name!r}: the manifest says shapes {_three(wanted)}, the"
                f" plan was built for {_three(found)}"
            )


def _three(shapes: Sequence[Sequence[int]]) -> str:
    return " / ".join(map(_shown, shapes))


def _shown(shape: Sequence[int | str]) -> str:
    return f"[{', '.join('?' if size == -1 else str(size) for size in shape)}]"
