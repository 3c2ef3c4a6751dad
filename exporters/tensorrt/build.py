"""Build a plan of TensorRT or TensorRT-RTX: a builder, a network that a callback fills, and the
options of the build.

Everything is strongly typed: the dtypes of the graph are the ones that are computed in, and fp32
is not TF32.  TensorRT measures kernels on the GPU that the plan is for; TensorRT-RTX compiles
without a GPU, and chooses kernels where the plan is loaded.  We have built with TensorRT-RTX alone.
"""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from enginecast.errors import LoweringError, MissingError, UsageError
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt.options import Hardware, TensorRTOptions, TensorRTRTXOptions
from enginecast.exporters.tensorrt.timing import (
    Build,
    Memory,
    attach_cache,
    estimate,
    keep_build,
    keep_cache,
    memory_of,
    read_history,
)
from enginecast.runtime.bundle.manifest import ShapeRange
from enginecast.runtime.device.versions import numbers
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger
from enginecast.runtime.sessions.tensorrt.library import Library, library_of

DEFAULT_LEVEL = 3
"""TensorRT's builder_optimization_level, unless it is set."""
_HARDWARE: Mapping[Hardware, str] = {
    "none": "NONE",
    "ampere+": "AMPERE_PLUS",
    "same-capability": "SAME_COMPUTE_CAPABILITY",
}
Fill = Callable[[Any, Any], Any]
"""Adds layers to a network; gets the network and the logger, and gives what has to live until the
network is built.  It raises LoweringError."""


@dataclass(frozen=True)
class Job:
    """An order on this machine."""

    trt: Any
    """The module of its library."""
    order: LoweringRequest
    profiles: tuple[tuple[ShapeRange, ...], ...]
    """Each of all dynamic inputs; empty: every shape is fixed."""
    needs: Mapping[str, str]
    """What the plan will ask of a machine; empty: what was written for it decides that."""

    @property
    def library(self) -> Library:
        return library_of(self.trt)

    @property
    def memory(self) -> Memory | None:
        """Where the timing cache lies, and how long earlier builds took; None: nothing is measured
        in a build.
        """
        if self.library.builds_without_gpu:
            return None
        return memory_of(self.order.options.timing_cache, self.needs)


@dataclass(frozen=True)
class Plan:
    """A plan, and how it was built."""

    content: Any
    """A buffer."""
    layers: Mapping[str, int]
    """Layers of the network, by what the parser says they are of: "[ONNX Layer: linear]"."""
    seconds: float
    warnings: tuple[str, ...]


def build_plan(job: Job, fill: Fill, weights: int) -> Plan:
    """The serialized engine.

    Args:
        fill: makes the network.
        weights: bytes of weights that the network holds.

    Raises:
        LoweringError: the network cannot be made, or not built: with all that the library said.
        MissingError: there is no builder, for want of a GPU or a driver.
        KeyboardInterrupt: the user stopped the build.
    """
    trt, options, say = job.trt, job.order.options, job.order.say
    messages = Messages()
    logger = error_logger(trt, messages)
    builder = _builder(trt, logger, messages)
    # TensorRT 11 knows no other networks and ignores the flag.
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    kept = fill(network, logger)
    config = _config(job, builder, messages)
    found = [network.get_layer(index) for index in range(network.num_layers)]
    layers = Counter(layer.metadata or layer.name for layer in found)
    memory, earlier = job.memory, tuple[Build, ...]()
    if memory is not None:
        level = DEFAULT_LEVEL if options.level is None else options.level
        earlier = read_history(memory.history, say)
        say(estimate(max(1, len(found)), level, earlier))
    messages.clear()  # what came before was dealt with
    start = time.perf_counter()
    with _watched(trt, job.order.tell) as monitor:
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
    del kept
    seconds = time.perf_counter() - start
    if plan is None:
        raise LoweringError(
            f"{job.library.version(trt)} cannot build this engine: {messages.take()}",
            hint="--target onnxruntime builds without TensorRT.",
        )
    if memory is not None:
        keep_cache(config, memory.cache, say)
        build = Build(max(1, len(found)), weights, level, seconds)
        keep_build(memory.history, build, earlier, say)
    return Plan(plan, layers, seconds, tuple(messages.warnings))


@contextmanager
def _watched(trt: Any, tell: Callable[[str, int, int], None]) -> Iterator[Any]:
    """A tensorrt.IProgressMonitor for one build, which Ctrl-C stops after its current step.

    TensorRT calls back from C++, where an exception of Python must not go: what is raised in a
    callback is kept, the build is asked to stop, and it is raised again after the build has
    returned.
    https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api/infer/Core/ProgressMonitor.html

    Args:
        tell: gets the name of a phase, the steps that are done, and their number.
    """
    reasons: list[BaseException] = []
    totals: dict[str, int] = {}

    def report(phase: str, done: int, total: int) -> None:
        try:
            tell(phase, done, total)
        except BaseException as error:  # whatever it is must not reach C++
            reasons.append(error)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # known when it runs
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            totals[phase_name] = num_steps
            report(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            report(phase_name, step + 1, totals.get(phase_name, step + 1))
            return not reasons

        def phase_finish(self, phase_name: str) -> None:
            totals.pop(phase_name, None)

    # Python tells only the main thread of Ctrl-C.
    is_told = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if is_told:
        signal.signal(signal.SIGINT, lambda *_: reasons.append(KeyboardInterrupt()))
    try:
        yield Monitor()
    finally:
        if is_told:
            signal.signal(signal.SIGINT, before)
    if reasons:
        raise reasons[0]


def _builder(trt: Any, logger: Any, messages: Messages) -> Any:
    try:
        return trt.Builder(logger)
    except (TypeError, RuntimeError) as error:  # pybind11: "factory function returned nullptr"
        said = messages.take() if messages else str(error)
        raise MissingError(
            f"{library_of(trt).version(trt)} cannot create a builder: {said}",
            hint="It needs a GPU and a driver for its CUDA; see `enginecast doctor`.",
        ) from error


def _config(job: Job, builder: Any, messages: Messages) -> Any:
    config, trt, options = builder.create_builder_config(), job.trt, job.order.options
    if options.refit:
        config.set_flag(trt.BuilderFlag.REFIT)
    elif options.strip_weights:
        # The weights that come back are those that it was built with: kernels may rely on them.
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    if options.strip_weights:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    config.clear_flag(trt.BuilderFlag.TF32)  # is set unless somebody clears it
    # For the report of fusions and dtypes; names of layers and shapes, no weights.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for number in range(len(job.profiles)):
        _add_profile(job, builder, config, number, messages)
    if isinstance(options, TensorRTRTXOptions):
        capabilities = built_for(trt, options, job.order.arch)
        config.num_compute_capabilities = len(capabilities)
        for number, name in enumerate(capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, _member(name)), number)
    else:
        _tune(config, trt, options)
        assert job.memory is not None  # it measures
        attach_cache(config, job.memory.cache, job.order.say)
    return config


def _tune(config: Any, trt: Any, options: TensorRTOptions) -> None:
    """What only TensorRT has."""
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    level = getattr(trt.HardwareCompatibilityLevel, _HARDWARE[options.hardware])
    config.hardware_compatibility_level = level
    if options.level is not None:
        config.builder_optimization_level = options.level
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)


def built_for(trt: Any, options: Any, arch: str | None) -> tuple[str, ...]:
    """The compute capabilities that an engine is built for; empty: TensorRT-RTX's own choice.

    Args:
        arch: the architecture asked for, such as "sm89".

    Raises:
        UsageError: one that TensorRT-RTX does not build for, or that is not `arch`'s.
    """
    of_arch = () if arch is None else (f"{arch[2:-1]}.{arch[-1]}",)
    known = [
        f"{name[2:-1]}.{name[-1]}"
        for name in trt.ComputeCapability.__members__
        if name.startswith("SM")
    ]
    for option, names in (("--compute", options.compute), ("--arch", of_arch)):
        if unknown := [name for name in names if name not in known]:
            raise UsageError(
                f"{option} {arch if option == '--arch' else unknown[0]}: TensorRT-RTX builds for"
                f" {', '.join(known)}",
                hint="Use --target tensorrt on such a GPU.",
            )
    if of_arch and options.compute and min(options.compute, key=numbers) != of_arch[0]:
        raise UsageError(
            f"--compute {','.join(options.compute)}: --arch {arch} is {of_arch[0]}, and the oldest"
            " of them decides what an engine may use",
        )
    return tuple(options.compute) or of_arch


def _member(capability: str) -> str:
    return f"SM{capability.replace('.', '')}"


def _add_profile(job: Job, builder: Any, config: Any, number: int, messages: Messages) -> None:
    profile, title = builder.create_optimization_profile(), job.library.title
    for one in job.profiles[number]:
        try:
            profile.set_shape(one.name, one.least, one.optimal, one.greatest)
        except ValueError as error:
            raise LoweringError(
                f"{title} refuses the shapes {one.least}, {one.optimal}, {one.greatest} of"
                f" '{one.name}' in profile {number}: {error}"
            ) from error
    if config.add_optimization_profile(profile) < 0:
        raise LoweringError(f"{title} refuses profile {number} of the inputs: {messages.take()}")
