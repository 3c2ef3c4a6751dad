"""Run an engine with ONNX Runtime."""

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import onnxruntime
from onnxruntime import IOBinding, OrtValue

from enginecast.errors import BundleError, EnginecastError, InputError, MissingError
from enginecast.installation import install_command
from enginecast.runtime.bundle.manifest import EngineRecord, Input, Output
from enginecast.runtime.bundle.onnx_file import check_onnx, weight_files
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device.out_of_memory import lacks_memory
from enginecast.runtime.device.versions import numbers
from enginecast.runtime.sessions.integer_sums import misfit
from enginecast.runtime.sessions.session import NodeTimes, Session, Stop
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.values.arrays import BFLOAT16, ONNX_BFLOAT16, Array, from_ort, to_ort
from enginecast.runtime.values.device_tensor import DeviceTensor, Feed, shown_shapes

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""See onnxruntime_session_options_config_keys.h."""
_FORMAT = "session.load_model_format"
_KERNEL_SUFFIX = "_kernel_time"
_RUNS = 5
"""Most runs whose nodes are timed."""
_FATAL = 4  # the log level above error: ONNX Runtime raises its errors as well as printing them
_TYPES = {"float32": "float", "float64": "double"}  # other names are those of numpy
_DEVICES = {CUDA_PROVIDER: "cuda", "TensorrtExecutionProvider": "cuda"}
_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
}


class _Stopping:
    """Options of a run that can be stopped, as long as the block: for `Session.stopping`."""

    __slots__ = ("_of_thread", "_run")

    def __init__(self, of_thread: threading.local, run: Stop) -> None:
        self._of_thread, self._run = of_thread, run

    def __enter__(self) -> None:
        options = onnxruntime.RunOptions()
        self._of_thread.options = options
        self._run.set_act(lambda: setattr(options, "terminate", True))

    def __exit__(self, *exception: object) -> None:
        self._run.set_act(None)
        self._of_thread.options = None


class OrtSession(Session):
    """One ONNX Runtime session.  Every run has its own binding, so that threads do not meet."""

    name = "onnxruntime"
    runs_code = False
    can_stop = True
    copies_weights = True
    packages = ("onnxruntime-gpu", "onnxruntime")
    tunable = tuple(name for name in Settings.__struct_fields__ if name != "fixed_sizes")

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        provider: str,
        file: str,
        profile: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        """
        Args:
            profile: where the session, made with `profiled` options, writes what it runs.
        """
        self._session = session
        self._provider = provider
        self._file = file
        self._profile = profile
        self._executed: tuple[str, ...] | None = None
        self._of_thread = threading.local()
        self._is_plain = provider == CPU_PROVIDER and not any(
            node.type == "tensor(bfloat16)" for node in session.get_outputs()
        )
        """Whether outputs are numpy arrays in CPU memory."""

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
        needed = record.minimum_runtime.partition(">=")[2]
        if needed and numbers(onnxruntime.__version__) < numbers(needed):
            raise MissingError(
                f"expected {record.minimum_runtime}, got onnxruntime {onnxruntime.__version__}",
                hint=f"pip install --upgrade '{record.minimum_runtime}'",
            )
        available = onnxruntime.get_available_providers()
        for provider in providers:
            if provider not in available:
                raise MissingError(
                    f"{provider}: not in this ONNX Runtime, which has {', '.join(available)}",
                    hint=f"{install_command('cuda')} adds the CUDA and TensorRT providers.",
                )
        if record.precision == "bf16" and providers[0] == CPU_PROVIDER:
            raise MissingError(
                f"{record.file}: a bf16 engine, and ONNX Runtime's {CPU_PROVIDER} has no bf16"
                " kernels",
                hint="Run it on CUDA (device='cuda'), or export with --precision fp32 or fp16.",
            )
        options = options_for(record.precision, providers[0], record.quantized)
        # What differs from the default changes; what a precision needs stays.
        if not settings.spinning:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if not settings.prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena &= settings.arena
        options.enable_mem_pattern &= settings.memory_pattern
        level = options.graph_optimization_level
        options.graph_optimization_level = min(level, _LEVELS[settings.graph], key=int)
        if settings.parallel:
            options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        profile = _profiled(options) if counts_ops else None
        content = bundle.read(record.file)
        operators = check_onnx(content, record.file, weight_files(bundle, record.weights))
        if reason := misfit(record, operators, providers[0]):
            raise MissingError(
                f"{record.file}: {reason}",
                hint="Export it again with --precision int8: its weights of 7 bits run on every"
                ' CPU. (In a plan, "bits": 7; in a pipeline, plan-int8{any_cpu=true}, the'
                " default.)",
            )
        # By the folder that was checked, and not by its name; no other file is opened.
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(bundle.folder))
        session = create_session(record.file, providers, threads, options, content=content)
        declared = bundle.manifest.engine_outputs
        _require_signature(record.file, "inputs", bundle.manifest.inputs, session.get_inputs())
        _require_signature(record.file, "outputs", declared, session.get_outputs())
        return cls(session, providers[0], record.file, profile)

    @classmethod
    def misfit(cls, record: EngineRecord) -> str:
        return misfit(record)

    @classmethod
    def node_times(
        cls,
        bundle: Bundle,
        record: EngineRecord,
        providers: Sequence[str],
        threads: int | None,
        feeds: Mapping[str, Feed],
        seconds: float,
    ) -> NodeTimes | None:
        options = options_for(record.precision, providers[0], record.quantized)
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(bundle.folder))
        content = bundle.read(record.file)
        check_onnx(content, record.file, weight_files(bundle, record.weights))
        with _profiled(options):
            session = create_session(record.file, providers, threads, options, content=content)
            opened = cls(session, providers[0], record.file)
            outputs = [node.name for node in session.get_outputs()]
            opened.run(feeds, outputs)  # warms up
            start, runs = time.perf_counter(), 0
            while not runs or (runs < _RUNS and time.perf_counter() - start < seconds):
                opened.run(feeds, outputs)
                runs += 1
            return _node_times(Path(session.end_profiling()), runs)

    def stopping(self, run: Stop) -> "_Stopping":
        return _Stopping(self._of_thread, run)

    @property
    def _options(self) -> onnxruntime.RunOptions | None:
        """What the run of this thread can be stopped by."""
        return getattr(self._of_thread, "options", None)

    def executed_ops(self) -> tuple[str, ...] | None:
        return self._executed

    @property
    def provider(self) -> str:
        return self._provider

    def run(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, OrtValue]:
        """Run once; the values stay on the provider's device.

        The provider computes on a stream of its own, before which ONNX Runtime waits for nobody
        (microsoft/onnxruntime#26609), so whoever makes a tensor on the device has to be waited for
        here.  (`user_compute_stream` binds a whole session to one stream, and takes that of
        torch's default, 0, for none: microsoft/onnxruntime#19229.)  Behind a run it does wait for
        its stream, unless `disable_synchronize_execution_providers` is set
        (onnxruntime_run_options_config_keys.h), so the outputs may be read at once.
        """
        device = _DEVICES.get(self._provider, "cpu")
        for name, feed in feeds.items():
            if isinstance(feed, DeviceTensor):
                feed.require_on(name, device, 0)
        binding = self._session.io_binding()
        try:
            held = [_bind(binding, name, feed) for name, feed in feeds.items()]
            for name in outputs:
                binding.bind_output(name, device)
            self._session.run_with_iobinding(binding, self._options)
            del held
            if self._profile is not None:
                ran = _node_events(Path(self._session.end_profiling()))
                self._executed = tuple(event["args"]["op_name"] for event in ran)
                self._profile.cleanup()
                self._profile = None
        except Exception as error:  # ONNX Runtime's errors have no common base of their own
            raise self._failed(feeds, error) from error
        return dict(zip(outputs, binding.get_outputs(), strict=True))

    def run_to_host(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, Array]:
        """The same; where all of it lies in CPU memory, a binding would cost more than it saves."""
        if (
            not self._is_plain
            or self._profile is not None
            or not all(map(_is_plain, feeds.values()))
        ):
            return super().run_to_host(feeds, outputs)
        try:
            found = self._session.run(outputs, feeds, self._options)
        except Exception as error:  # as above
            raise self._failed(feeds, error) from error
        return dict(zip(outputs, found, strict=True))

    def _failed(self, feeds: Mapping[str, Feed], error: Exception) -> EnginecastError:
        shapes = shown_shapes(feeds)
        if lacks_memory(error):
            return MissingError(
                f"{self._file}: too little memory for {shapes}: {error}",
                hint="Give smaller batches.",
            )
        return InputError(f"{self._file}: failed on {shapes}: {error}")

    def to_host(self, value: OrtValue) -> Array:
        if value.device_name() == "cpu":
            return from_ort(value)
        host = OrtValue.ortvalue_from_shape_and_type(value.shape(), value.element_type())
        onnxruntime.copy_tensors([value], [host])
        return from_ort(host)


def _is_plain(feed: Feed) -> bool:
    """Whether ONNX Runtime takes it as a numpy array."""
    return isinstance(feed, np.ndarray) and feed.dtype != BFLOAT16


def _bind(binding: IOBinding, name: str, feed: Feed) -> Any:
    """Bind an input where it lies; what is returned must live until the run is over."""
    if not isinstance(feed, DeviceTensor):
        binding.bind_ortvalue_input(name, to_ort(feed))
        return feed
    own = feed.aligned()
    own.wait()
    kind = ONNX_BFLOAT16 if own.dtype == "bfloat16" else np.dtype(own.dtype).type
    binding.bind_input(name, own.device, own.index, kind, own.shape, own.pointer)
    return own


def options_for(precision: str, provider: str, quantized: str = "") -> onnxruntime.SessionOptions:
    """Options that an engine of this precision needs on a provider.

    ONNX Runtime 1.31's layout optimizers, the last of its levels, crash the process on some fp16
    graphs on the CPU (seen: `nn.MultiheadAttention` and a LayerNorm over its residual sum).

    There it also casts every weight to fp32 in each run, and its arena keeps the most that any run
    took, once for each shape: 9.3 GB were seen for 1.2 billion weights.  Without the arena a run
    takes what it needs and gives it back.

    Of quantized engines (`EngineRecord.quantized`) it would rewrite DequantizeLinear and the MatMul
    behind it: into integer products that take no fp8, so that the file is refused, or into
    MatMulNBits that rounds activations to int8 as well, which nobody asked for.

    Two of its fused kernels are slower on the CPU than what they replace: SkipLayerNormalization
    takes 5 to 7 times as long as Add and LayerNormalization, and BiasGelu writes a buffer more than
    Add and Gelu do (1.31).
    """
    options = onnxruntime.SessionOptions()
    left_out = ["QDQSelectorActionTransformer"] if quantized else []
    if provider == CPU_PROVIDER:
        left_out += ["SkipLayerNormFusion", "BiasGeluFusion"]
    if left_out:
        options.add_session_config_entry(
            "optimization.disable_specified_optimizers", ";".join(left_out)
        )
    if precision == "fp16" and provider == CPU_PROVIDER:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.enable_cpu_mem_arena = False
    return options


def create_session(
    path: str | Path,
    providers: Sequence[str],
    threads: int | None = None,
    options: onnxruntime.SessionOptions | None = None,
    *,
    content: bytes | None = None,
) -> onnxruntime.InferenceSession:
    """Make a session and see that it runs where it was asked to.

    ONNX Runtime falls back to the CPU when a provider fails to start
    (microsoft/onnxruntime#23372), so what the session says of itself is compared with what was
    asked for.

    Args:
        path: the file; of `content` its name, for messages.
        content: its bytes, where they were read before.

    Raises:
        MissingError: a provider did not start, or has no kernel for an operator.
        BundleError: ONNX Runtime refuses the file.
    """
    options = options or onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    options.add_session_config_entry(_FORMAT, "ONNX")  # what `check_onnx` walked, and nothing else
    if threads is not None:
        options.intra_op_num_threads = threads
    path = Path(path)
    try:
        session = onnxruntime.InferenceSession(
            str(path) if content is None else content, options, providers=list(providers)
        )
    except Exception as error:  # ONNX Runtime's errors have no common base of their own
        if "NOT_IMPLEMENTED" in str(error):
            raise MissingError(f"{path.name}: {providers[0]} cannot run it: {error}") from error
        raise BundleError(f"{path.name}: ONNX Runtime refuses it: {error}") from error
    actual = session.get_providers()[0]
    if actual != providers[0]:
        raise MissingError(
            f"{providers[0]}: asked for, but ONNX Runtime fell back to {actual}",
            hint="See `enginecast doctor`: often the CUDA or cuDNN libraries were not found.",
        )
    return session


def _require_signature(
    file: str, field: str, declared: Sequence[Input | Output], actual: Sequence[Any]
) -> None:
    """Refuse an engine file that takes or gives something else than the manifest says."""
    expected = {tensor.name: _TYPES.get(tensor.dtype, tensor.dtype) for tensor in declared}
    got = {node.name: node.type.removeprefix("tensor(").removesuffix(")") for node in actual}
    if expected != got:
        raise BundleError(f"{file}: {field}: the manifest says {expected}, the file has {got}")


def _profiled(options: onnxruntime.SessionOptions) -> tempfile.TemporaryDirectory[str]:
    """Let a session write down what it runs; return the folder where it does.

    Asking the profiler writes no weights, unlike saving the optimized model.
    """
    folder = tempfile.TemporaryDirectory(prefix="enginecast-profile-")
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(folder.name) / "ops")
    return folder


def _node_events(profile: Path) -> Iterator[dict[str, Any]]:
    """The runs of nodes that a profile lists, in order."""
    for event in json.loads(profile.read_bytes()):
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL_SUFFIX):
            yield event


def _node_times(profile: Path, runs: int) -> NodeTimes:
    """The time of each node over the last runs; what ran before them warmed up."""
    spent: dict[tuple[str, str], list[float]] = {}
    for event in _node_events(profile):
        node = event["name"].removesuffix(_KERNEL_SUFFIX), event["args"]["op_name"]
        spent.setdefault(node, []).append(float(event["dur"]))
    nodes = []
    for (name, op), every in spent.items():
        turns = max(1, len(every) // (runs + 1))  # of a loop's body, in each run
        each = [sum(every[i : i + turns]) for i in range(0, len(every), turns)]
        nodes.append((name, op, median(each[1:] or each)))
    return NodeTimes(runs, tuple(nodes))
