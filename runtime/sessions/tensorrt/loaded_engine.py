"""A loaded TensorRT engine file: the engine, and its input and output tensors."""

import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from enginecast.errors import BundleError, InputError, MissingError
from enginecast.runtime.bundle.manifest import (
    EngineRecord,
    Input,
    Manifest,
    Output,
    ShapeRange,
    profile_of,
)
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger
from enginecast.runtime.sessions.tensorrt.library import RTX, library_of

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
_INVALID = {
    "VERSION_MISMATCH": "it was built with another version",
    "UNSUPPORTED_CC": "it was not built for this GPU's compute capability",
    "OLD_CUDA_DRIVER": "the driver is too old",
    "OLD_CUDA_RUNTIME": "CUDA is too old",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little memory",
    "CUDA_ERROR": "CUDA fails",
}
"""TensorRT-RTX's reasons (EngineInvalidityDiagnostics)."""


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
    profiles: tuple[Mapping[str, ShapeRange], ...]
    """Each by name of the input; empty: every shape is fixed."""
    messages: Messages
    """What the engine reports outside of runs."""
    keep: tuple[Any, ...]
    """What must live as long as the engine, which calls it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of what is asked of the engine itself."""

    def profile_for(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """The number of the first profile that has these shapes, in the order of the inputs.

        Raises:
            InputError: none has; names the profiles.
        """
        given = {one.name: shape for one, shape in zip(self.inputs, shapes, strict=True)}
        if not self.profiles:
            return 0
        every = [one for profile in self.profiles for one in profile.values()]
        number = profile_of(every, given)
        if number is not None:
            return number
        varying = self.profiles[0]
        shown = "; ".join(
            ", ".join(f"{one.name} {_range(one)}" for one in profile.values())
            for profile in self.profiles
        )
        got = ", ".join(f"{name} {list(given[name])}" for name in varying)
        several = "shapes of one profile" if len(self.profiles) > 1 else "shapes"
        raise InputError(
            f"{self.file}: expected {several}: {shown}; got {got}",
            hint="The engine was built for those; export it with the range that you need.",
        )


def _range(built: ShapeRange) -> str:
    return f"{list(built.least)}..{list(built.greatest)}"


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
    logger = error_logger(trt, messages)
    try:
        runtime = trt.Runtime(logger)
    except (TypeError, RuntimeError) as error:  # pybind11: "factory function returned nullptr"
        said = messages.take() if messages else str(error)
        raise MissingError(
            f"{library_of(trt).version(trt)} cannot create a runtime: {said}",
            hint="It needs a GPU and a driver for its CUDA; see `enginecast doctor`.",
        ) from error
    # A version-compatible engine brings the runtime of its version along, which is a library.
    runtime.engine_host_code_allowed = record.requires.get("version_compatible") == "yes"
    if library_of(trt) is RTX:
        _require_valid(trt, runtime, path, record, messages)
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
        _refit(trt, engine, record, network)
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
    profiles = profiles_of(record)
    _require_profiles(record.file, inputs, profiles, _built_for(engine, inputs))
    keep = (runtime, logger)
    return LoadedEngine(trt, engine, record.file, inputs, outputs, profiles, messages, keep)


def profiles_of(record: EngineRecord) -> tuple[Mapping[str, ShapeRange], ...]:
    """The profiles of an engine, by number."""
    count = 1 + max((one.profile for one in record.profile), default=-1)
    return tuple(
        {one.name: one for one in record.profile if one.profile == number}
        for number in range(count)
    )


def _require_valid(
    trt: Any, runtime: Any, path: Path, record: EngineRecord, messages: Messages
) -> None:
    """Ask TensorRT-RTX whether a plan would load, by its header alone.

    Raises:
        BundleError: it is no plan.
        MissingError: it would not; with all of the library's reasons.
    """
    with path.open("rb") as file:
        header = file.read(runtime.engine_header_size)
    validity, reasons = runtime.get_engine_validity(header)
    if validity != trt.EngineValidity.INVALID:
        return
    if int(reasons) & int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE):
        raise BundleError(
            f"{record.file}: expected a plan of {library_of(trt).title}, got another file",
            hint="Export the model again.",
        )
    known = trt.EngineInvalidityDiagnostics.__members__.items()
    named = [_INVALID.get(name, name) for name, value in known if int(reasons) & int(value)]
    raise MissingError(
        f"{record.file}: {library_of(trt).version(trt)} cannot load it here:"
        f" {', '.join(named) or messages.take()}",
        hint="Update NVIDIA's driver, or export the model for this GPU and version.",
    )


def _refit(trt: Any, engine: Any, record: EngineRecord, network: Path) -> None:
    """Fill in the weights of the ONNX file, whose own are in the file beside it."""
    if not engine.refittable:
        raise BundleError(
            f"{record.file}: expected a plan whose weights can be filled in, as the manifest says,"
            " and this one's cannot",
            hint="Export the model again.",
        )
    messages = Messages()
    refitter = trt.Refitter(engine, error_logger(trt, messages))
    parser = trt.OnnxParserRefitter(refitter, error_logger(trt, messages))
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


def _built_for(engine: Any, inputs: Sequence[Tensor]) -> list[dict[str, tuple[Any, ...]]]:
    """Of each profile of an engine, the least, optimal and greatest shape of each input."""
    return [
        {
            one.name: tuple(map(tuple, engine.get_tensor_profile_shape(one.binding, number)))
            if -1 in one.shape
            else (one.shape,) * 3
            for one in inputs
        }
        for number in range(engine.num_optimization_profiles)
    ]


def _require_profiles(
    file: str,
    inputs: Sequence[Tensor],
    profiles: Sequence[Mapping[str, ShapeRange]],
    built: Sequence[Mapping[str, tuple[Any, ...]]],
) -> None:
    """The profiles of the engine must be what the manifest says."""
    if len(built) != max(1, len(profiles)):
        raise BundleError(
            f"{file}: the manifest says {max(1, len(profiles))} profiles, the plan has {len(built)}"
        )
    for number, profile in enumerate(profiles or ({},)):
        unknown = sorted(profile.keys() - {one.name for one in inputs})
        if unknown:
            raise BundleError(
                f"{file}: the manifest has a profile of {unknown[0]!r}, which is not an input"
            )
        for tensor in inputs:
            found = built[number][tensor.name]
            said = profile.get(tensor.name)
            # A shape that never varies needs no range.
            wanted = (said.least, said.optimal, said.greatest) if said else (tensor.shape,) * 3
            if found != wanted:
                raise BundleError(
                    f"{file}: input {tensor.name!r}: the manifest says shapes {_three(wanted)} in"
                    f" profile {number}, the plan was built for {_three(found)}"
                )


def _three(shapes: Sequence[Sequence[int]]) -> str:
    return " / ".join(map(_shown, shapes))


def _shown(shape: Sequence[int | str]) -> str:
    return f"[{', '.join('?' if size == -1 else str(size) for size in shape)}]"
