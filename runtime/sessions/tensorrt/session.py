"""Run an engine of TensorRT or TensorRT-RTX.

Their library and torch are imported when such an engine is opened: torch holds the tensors, and
speaks DLPack to others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from enginecast.errors import InputError, MissingError, UsageError
from enginecast.runtime.bundle.manifest import EngineRecord
from enginecast.runtime.bundle.onnx_file import check_onnx, weight_files
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device import gpu as gpus
from enginecast.runtime.device.gpu import Gpu
from enginecast.runtime.sessions.session import Session
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.sessions.tensorrt.fitness import machine, require_fit, require_portable_fit
from enginecast.runtime.sessions.tensorrt.lanes import ExecutionError, Lane, Lanes
from enginecast.runtime.sessions.tensorrt.layers import Layers, parse_layers
from enginecast.runtime.sessions.tensorrt.library import (
    RTX,
    TENSORRT,
    Library,
    import_tensorrt,
)
from enginecast.runtime.sessions.tensorrt.loaded_engine import LoadedEngine, load_engine
from enginecast.runtime.sessions.torch_session import require_torch
from enginecast.runtime.values.arrays import Array
from enginecast.runtime.values.device_tensor import DeviceTensor, Feed

ALIGNED = 256
"""Bytes; where TensorRT wants a tensor to begin (NvInferRuntime.h, setTensorAddress)."""


class TensorRTSession(Session):
    """One engine.  Runs from several threads at once have a context each, up to `lanes.LANES`."""

    name = TENSORRT.name
    library: ClassVar[Library] = TENSORRT
    providers: ClassVar = {"CUDAExecutionProvider": TENSORRT.name}
    packages: ClassVar[tuple[str, ...]] = ("torch", TENSORRT.name)
    records_graphs: ClassVar[bool] = True
    """Whether runs of equal shapes are recorded as CUDA graphs."""

    def __init__(self, loaded: LoadedEngine, gpu: Gpu, *, cuda_graphs: bool) -> None:
        """A MissingError where TensorRT makes no context."""
        self._loaded = loaded
        self._gpu = gpu
        self._lanes = Lanes(lambda: Lane(loaded, gpu, graphs=cuda_graphs), gpu.is_idle)

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
        library = cls.library
        if providers[0] != library.name and providers[0] not in cls.providers:
            raise UsageError(
                f"{record.file}: {providers[0]}: {library.title} engines run on a GPU",
                hint="Use device='cuda' (--device cuda), or prefer=['onnxruntime-cpu'] (--prefer).",
            )
        instead = _what_else(bundle, record)
        torch = require_torch(record, library.title)
        with _saying(record.file, instead):
            trt = import_tensorrt(f"a {library.title} engine", library)
            gpu = gpus.Gpu(torch)
            cls.require_fit(trt, gpu, record, instead)
        network = None if record.network is None else bundle.folder / record.network
        if record.network is not None:
            weights = weight_files(bundle, record.weights)
            check_onnx(bundle.read(record.network), record.network, weights)
        with _saying(record.file, instead):
            loaded = load_engine(trt, bundle.folder / record.file, record, bundle.manifest, network)
        return cls(loaded, gpu, cuda_graphs=cuda_graphs and cls.records_graphs)

    @classmethod
    def require_fit(cls, trt: Any, gpu: Gpu, record: EngineRecord, instead: str) -> None:
        """Refuse an engine that was built for another machine.

        Raises:
            MissingError: says what is needed and what is here, each in one sentence.
        """
        require_fit(record.requires, machine(trt, gpu), record.file, instead)

    @property
    def provider(self) -> str:
        return self.name

    @property
    def lanes(self) -> Lanes:
        """The contexts made so far."""
        return self._lanes

    def run(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, Any]:
        """Run once; the values are tensors on the GPU, ready on the stream in use.

        A numpy array is copied to the GPU; a tensor there is read where it is.

        Raises:
            InputError: a tensor lies on another device, the engine was not built for a shape, or
                TensorRT fails on these inputs.
        """
        inputs = [self._input(one.name, feeds[one.name]) for one in self._loaded.inputs]
        try:
            with self._lanes.take() as lane:
                found = lane.run(inputs)
        except ExecutionError as error:
            named = zip(self._loaded.inputs, inputs, strict=True)
            shapes = ", ".join(f"{one.name} {list(value.shape)}" for one, value in named)
            raise InputError(f"{self._loaded.file}: failed on {shapes}: {error}") from error
        names = [one.name for one in self._loaded.outputs]
        values = dict(zip(names, found, strict=True))
        return {name: values[name] for name in outputs}

    def to_host(self, value: Any) -> Array:
        return self._gpu.to_host(value)

    def versions(self) -> dict[str, str]:
        # Its package has a name for each version of CUDA.
        return {**super().versions(), self.name: str(self._loaded.trt.__version__)}

    def layers(self) -> tuple[str, ...]:
        """What the builder made of the network, in a few lines."""
        return self.inspect().lines()

    def inspect(self) -> Layers:
        """What the builder made of the network, layer by layer, as the engine reports it."""
        trt, engine = self._loaded.trt, self._loaded.engine
        with self._loaded.lock:
            inspector = engine.create_engine_inspector()
            text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
        return parse_layers(text, self._loaded.file)

    def _input(self, name: str, feed: Feed) -> Any:
        if not isinstance(feed, DeviceTensor):
            return self._gpu.to_device(feed)
        feed.require_on(name, *self._gpu.place)
        return feed.aligned(ALIGNED).tensor


class TensorRTRTXSession(TensorRTSession):
    """One engine of TensorRT-RTX, which compiles kernels for this GPU while it runs.

    It swaps kernels in for shapes that it meets again, which a recorded graph would never see.
    """

    name = RTX.name
    library = RTX
    providers: ClassVar = {"CUDAExecutionProvider": RTX.name}
    packages = ("torch",)
    records_graphs = False

    @classmethod
    def require_fit(cls, trt: Any, gpu: Gpu, record: EngineRecord, instead: str) -> None:
        require_portable_fit(trt, gpu, record.requires, record.file, instead)


def _what_else(bundle: Bundle, record: EngineRecord) -> str:
    """What of a bundle loads where its TensorRT engine does not, as a sentence."""
    for other in bundle.manifest.engines:
        if other.target != record.target and other.verdict.outcome != "rejected":
            return (
                f"{other.file} of this bundle is for ONNX Runtime and loads without TensorRT:"
                f" prefer=['{record.target}', 'onnxruntime-cuda', 'onnxruntime-cpu'] (--prefer)."
            )
    here = "" if record.target == RTX.name else ", or export the model on this machine"
    return (
        "Nothing else is in this bundle: export with `--also onnxruntime` for one that loads"
        f" without TensorRT{here}."
    )


@contextmanager
def _saying(file: str, instead: str) -> Iterator[None]:
    """Say with what is missing for which file it is, and what would load instead."""
    try:
        yield
    except MissingError as error:
        hint = ". ".join(part for part in (error.hint.rstrip("."), instead) if part)
        raise MissingError(f"{file}: {error.message}", hint=hint) from error
