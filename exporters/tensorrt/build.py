"""Build a TensorRT plan: a builder, a network that a callback fills, and the options of the build.

Everything is strongly typed: the dtypes of the graph are the ones that are computed in, and fp32
is not TF32.  None of this was run on real TensorRT by us yet.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from enginecast.errors import LoweringError, MissingError
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt.options import Hardware, TensorRTOptions
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
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger, error_recorder

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
    """The module tensorrt."""
    order: LoweringRequest
    profile: tuple[ShapeRange, ...]
    """Of each dynamic input; empty: every shape is fixed."""
    needs: Mapping[str, str]
    """What the plan will ask of a machine."""

    @property
    def memory(self) -> Memory:
        """Where the timing cache lies, and how long earlier builds took."""
        return memory_of(self.order.options.timing_cache, self.needs)


def build_plan(job: Job, fill: Fill, weights: int) -> Any:
    """The serialized engine, a buffer.

    Args:
        fill: makes the network.
        weights: bytes of weights that the network holds.

    Raises:
        LoweringError: the network cannot be made, or not built: with all that TensorRT said.
        MissingError: there is no builder, for want of a GPU or a driver.
        KeyboardInterrupt: the user stopped the build.
    """
    trt, options, say = job.trt, job.order.options, job.order.say
    messages = Messages()
    logger, recorder = error_logger(trt, messages), error_recorder(trt, messages)
    builder = _builder(trt, logger, messages)
    builder.error_recorder = recorder
    # TensorRT 11 knows no other networks and ignores the flag.
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    network.error_recorder = recorder
    kept = fill(network, logger)
    config = _config(job, builder, messages)
    earlier = read_history(job.memory.history, say)
    level = DEFAULT_LEVEL if options.level is None else options.level
    layers = max(1, int(network.num_layers))
    say(estimate(layers, level, earlier))
    messages.clear()  # what came before was dealt with
    start = time.perf_counter()
    with _watched(trt, job.order.tell) as monitor:
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
    del kept
    seconds = time.perf_counter() - start
    if plan is None:
        raise LoweringError(
            f"TensorRT {trt.__version__} cannot build this engine: {messages.take()}",
            hint="--target onnxruntime builds without TensorRT.",
        )
    keep_cache(config, job.memory.cache, say)
    keep_build(job.memory.history, Build(layers, weights, level, seconds), earlier, say)
    return plan


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
        said = messages.take() if len(messages) else str(error)
        raise MissingError(
            f"TensorRT {trt.__version__} cannot create a builder: {said}",
            hint="It needs a GPU and a driver for its CUDA; see `enginecast doctor`.",
        ) from error


def _config(job: Job, builder: Any, messages: Messages) -> Any:
    config, trt, options = builder.create_builder_config(), job.trt, job.order.options
    for flag in _flags(trt, options):
        config.set_flag(flag)
    config.clear_flag(trt.BuilderFlag.TF32)  # is set unless somebody clears it
    level = getattr(trt.HardwareCompatibilityLevel, _HARDWARE[options.hardware])
    config.hardware_compatibility_level = level
    # For the report of fusions and dtypes; names of layers and shapes, no weights.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.level is not None:
        config.builder_optimization_level = options.level
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    if job.profile:
        _add_profile(builder, config, job.profile, messages)
    attach_cache(config, job.memory.cache, job.order.say)
    return config


def _flags(trt: Any, options: TensorRTOptions) -> list[Any]:
    flags = []
    if options.refit:
        flags.append(trt.BuilderFlag.REFIT)
    elif options.strip_weights:
        # The weights that come back are those that it was built with: kernels may rely on them.
        flags.append(trt.BuilderFlag.REFIT_IDENTICAL)
    if options.strip_weights:
        flags.append(trt.BuilderFlag.STRIP_PLAN)
    if options.version_compatible:
        flags.append(trt.BuilderFlag.VERSION_COMPATIBLE)
    return flags


def _add_profile(
    builder: Any, config: Any, shapes: Sequence[ShapeRange], messages: Messages
) -> None:
    profile = builder.create_optimization_profile()
    for one in shapes:
        try:
            profile.set_shape(one.name, one.least, one.optimal, one.greatest)
        except ValueError as error:
            raise LoweringError(
                f"TensorRT refuses the shapes {one.least}, {one.optimal}, {one.greatest} of"
                f" '{one.name}': {error}"
            ) from error
    if config.add_optimization_profile(profile) < 0:
        raise LoweringError(f"TensorRT refuses the profile of the inputs: {messages.take()}")
