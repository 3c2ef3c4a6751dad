"""Concurrent runs of one TensorRT engine: each lane is an execution context with its own stream.

A context holds the shapes and addresses of one run, so that one thread at a time may set them; the
GPU's work of a lane is in the order of its stream, so that a lane is free again once a run is
enqueued.

    thread 1 ── lane 0: context, stream, graphs ──┐
    thread 2 ── lane 1: context, stream, graphs ──┴─ weights of the engine
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from enginecast.errors import MissingError
from enginecast.runtime.device.cuda_graphs import GraphCache, Run, Tensors
from enginecast.runtime.device.gpu import Gpu
from enginecast.runtime.sessions.tensorrt.errors import Messages, heard_by
from enginecast.runtime.sessions.tensorrt.loaded_engine import LoadedEngine

LANES = 4
"""Contexts for runs side by side; each takes the memory of a run."""
GRAPHS = 4
"""CUDA graphs of a lane; each has a context of its own."""


class ExecutionError(RuntimeError):
    """TensorRT answered that a run could not be enqueued; the text is its own."""


class Context:
    """An execution context: sets shapes and addresses, and enqueues a run."""

    def __init__(self, loaded: LoadedEngine, gpu: Gpu) -> None:
        """A MissingError where TensorRT makes no context; most often, memory is short."""
        self._loaded = loaded
        self._gpu = gpu
        self._messages = Messages()
        with loaded.lock:
            loaded.messages.clear()
            with heard_by(loaded.messages):
                self._context = loaded.engine.create_execution_context()
        if self._context is None:
            raise MissingError(
                f"{loaded.file}: TensorRT cannot create an execution context:"
                f" {loaded.messages.take()}",
                hint="GPU memory has usually run out: close other engines, or use a smaller batch.",
            )
        # A context begins with the only profile; of several, one has to be chosen.
        self._profile = 0 if len(loaded.profiles) < 2 else None
        self._given: list[tuple[int, ...]] = []
        self._found: list[tuple[int, ...]] = []

    def run(self, inputs: Tensors) -> list[Any]:
        """Enqueue one run on the current stream; the outputs are new tensors.

        Args:
            inputs: contiguous tensors on the GPU, in the engine's order and dtypes.

        Raises:
            InputError: the engine was not built for these shapes.
            ExecutionError: TensorRT cannot enqueue it.
        """
        with heard_by(self._messages):
            return self._run(inputs)

    def _run(self, inputs: Tensors) -> list[Any]:
        shapes = self._shapes([tuple(one.shape) for one in inputs])
        outputs = [
            self._gpu.empty(shape, tensor.dtype)
            for tensor, shape in zip(self._loaded.outputs, shapes, strict=True)
        ]
        tensors = [*self._loaded.inputs, *self._loaded.outputs]
        for tensor, value in zip(tensors, [*inputs, *outputs], strict=True):
            if not self._context.set_tensor_address(tensor.binding, value.data_ptr()):
                raise ExecutionError(f"the address of {tensor.name!r}: {self._messages.take()}")
        if not self._context.execute_async_v3(self._gpu.current_stream()):
            raise ExecutionError(self._messages.take())
        return outputs

    def _shapes(self, given: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The shapes of the outputs; the same shapes are not set again, which a graph that is
        being recorded could not hold.
        """
        if list(given) == self._given and self._found:
            return self._found
        self._given = []
        profile = self._loaded.profile_for(given)
        if profile != self._profile:
            stream = self._gpu.current_stream()
            if not self._context.set_optimization_profile_async(profile, stream):
                raise ExecutionError(f"profile {profile}: {self._messages.take()}")
            self._profile = profile
        for tensor, shape in zip(self._loaded.inputs, given, strict=True):
            if not self._context.set_input_shape(tensor.binding, shape):
                raise ExecutionError(
                    f"input {tensor.name!r} of shape {list(shape)}: {self._messages.take()}"
                )
        try:
            lacking = self._context.infer_shapes()
        except RuntimeError as error:
            raise ExecutionError(f"{error}: {self._messages.take()}") from error
        if lacking:
            raise ExecutionError(f"it lacks information about {', '.join(lacking)}")
        found = []
        for tensor in self._loaded.outputs:
            shape = tuple(self._context.get_tensor_shape(tensor.binding))
            if any(size < 0 for size in shape):
                raise ExecutionError(
                    f"the shape of output {tensor.name!r} depends on values ({list(shape)}), which"
                    " is not supported"
                )
            found.append(shape)
        self._given, self._found = list(given), found
        return found


class Lane:
    """A context with its stream, and the CUDA graphs that were recorded on it."""

    def __init__(self, loaded: LoadedEngine, gpu: Gpu, *, graphs: bool) -> None:
        self._loaded = loaded
        self._gpu = gpu
        self._context = Context(loaded, gpu)
        self._call: Run = self._context.run
        self.stream = gpu.new_stream()
        self.owner: threading.Thread | None = None
        """The thread that used it last."""
        if graphs:
            self._record = gpu.graph_recorder()
            self._call = GraphCache(self._context.run, self._record_apart, limit=GRAPHS)

    def run(self, inputs: Tensors) -> list[Any]:
        """Enqueue one run on the lane's stream; the outputs are for the stream in use now."""
        with self._gpu.on(self.stream, inputs) as hand_over:
            outputs = self._call(inputs)
            hand_over(outputs)
        return outputs

    def _record_apart(self, run: Run, inputs: Tensors) -> Run:
        """Record a context that nothing else uses: a graph holds its memory and its shapes.

        Raises:
            RuntimeError: it cannot be recorded, or there is no memory for it; runs go on without.
        """
        try:
            context = Context(self._loaded, self._gpu)
        except MissingError as error:
            raise ExecutionError(error.message) from error
        replay = self._record(context.run, inputs)

        def call(given: Tensors) -> list[Any]:
            found = replay(given)
            assert context is not None  # it lives as long as its graph
            return found

        return call


class Lanes:
    """The lanes of an engine: created when runs overlap, kept, and used by one thread at a time."""

    def __init__(self, make: Callable[[], Lane], is_idle: Callable[[Any], bool]) -> None:
        """
        Args:
            make: makes a lane; the first is made at once.
            is_idle: whether a stream's work is done.
        """
        self._make = make
        self._is_idle = is_idle
        self._free = [make()]
        self._made = 1
        self._changed = threading.Condition()

    @property
    def made(self) -> int:
        return self._made

    @contextmanager
    def take(self) -> Iterator[Lane]:
        """A lane for this thread alone; waits while all of them are in use."""
        lane = self._get()
        try:
            yield lane
        finally:
            with self._changed:
                self._free.append(lane)
                self._changed.notify()

    def _get(self) -> Lane:
        with self._changed:
            while True:
                # The one that this thread had before, which holds its graphs; else one whose work
                # is done; else, where no more may be made, any.
                this = threading.current_thread()
                mine = [lane for lane in self._free if lane.owner is this]
                idle = [lane for lane in self._free if not mine and self._is_idle(lane.stream)]
                rest = self._free if self._made == LANES else []
                lane = next(iter([*mine, *idle, *rest]), None)
                if lane is not None or self._made < LANES:
                    break
                self._changed.wait()
            if lane is None:
                self._made += 1
            else:
                self._free.remove(lane)
        if lane is None:
            try:
                lane = self._make()
            except BaseException:
                with self._changed:
                    self._made -= 1
                    self._changed.notify()
                raise
        lane.owner = threading.current_thread()  # numbers of threads come again
        return lane
