"""The runs of one TensorRT engine: an execution context with its own stream, and CUDA graphs.

A context holds the shapes and addresses of one run, so that one thread at a time may set them; the
GPU's work is in the order of its stream, so that it is free again once a run is enqueued.
"""

from collections.abc import Sequence
from typing import Any

from enginecast.errors import InputError, MissingError
from enginecast.runtime.device.cuda_graphs import GraphCache, Run, Tensors
from enginecast.runtime.device.gpu import Gpu
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_recorder
from enginecast.runtime.sessions.tensorrt.loaded_engine import LoadedEngine

GRAPHS = 4
"""CUDA graphs; each has a context of its own."""


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
            self._context = loaded.engine.create_execution_context()
        if self._context is None:
            raise MissingError(
                f"{loaded.file}: TensorRT cannot create an execution context:"
                f" {loaded.messages.take()}",
                hint="GPU memory has usually run out: close other engines, or use a smaller batch.",
            )
        self._recorder = error_recorder(loaded.trt, self._messages)
        self._context.error_recorder = self._recorder
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
        for tensor, shape in zip(self._loaded.inputs, given, strict=True):
            if not self._context.set_input_shape(tensor.binding, shape):
                wanted = self._loaded.range_of(tensor.name)
                raise InputError(
                    f"input {tensor.name!r}: expected a shape in {wanted}, got {list(shape)}:"
                    f" {self._messages.take()}",
                    hint="The engine was built for those; export it with the range that you need.",
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
