"""Call an engine whose state is inputs and outputs, step by step; needs only numpy, no torch."""

from collections.abc import Mapping
from typing import Any

from enginecast.errors import BundleError, InputError, UsageError
from enginecast.public import described, some
from enginecast.runtime.bundle.manifest import STATE_NAME
from enginecast.runtime.bundle.tensor_files import read_tensors
from enginecast.runtime.engine import Engine, Outputs, arranged, as_given
from enginecast.runtime.values.arrays import Array


class Stepper:
    """Calls an engine repeatedly, and passes each call the state that the last one returned.

    Args:
        engine: an engine that was exported with `--stateful`.

    Raises:
        UsageError: the engine has no state.
        BundleError: the file with the initial state is missing or damaged.

    Examples:
        >>> import enginecast, numpy
        >>> from enginecast.runtime import Stepper
        >>> step = Stepper(enginecast.load("stream.bundle"))
        >>> chunk = numpy.ones((1, 4, 9), "float32")
        >>> first, second = step(chunk)["y"], step(chunk)["y"]
        >>> bool((first == second).all())
        False
    """

    def __init__(self, engine: Engine) -> None:
        states = [state for state in engine.manifest.states if state.start]
        if not states:
            raise UsageError(
                f"{engine.folder}: the engine has no state that starts from stored values",
                hint="Export the model with --stateful.",
            )
        self.engine = engine
        self.state: dict[str, Array]
        """By input; it may be read, replaced and kept."""
        try:
            stored = read_tensors(engine.folder / STATE_NAME)
            self.state = {state.input: stored[state.start] for state in states}
        except (InputError, OSError, KeyError) as error:
            raise BundleError(f"{engine.folder / STATE_NAME}: not the state: {error}") from error
        self._pairs = {state.input: state.output for state in engine.manifest.states}
        self._start = dict(self.state)

    def __repr__(self) -> str:
        """The engine, and the state that the next call is fed."""
        state = some(f"{name} {described(array)}" for name, array in self.state.items())
        return f"Stepper({str(self.engine.folder)!r}, {self.engine.backend}: {state})"

    def __call__(self, *feeds: Any, **inputs: Any) -> Outputs:
        """Run the engine on the other inputs, by position or by name: `step(chunk)`.

        Args:
            feeds: the inputs but the state, in their order; or one mapping of them by name.
            inputs: by name.

        Returns:
            As `run`; tensors of torch where one of the inputs is such a tensor.

        Raises:
            EnginecastError: as `run`; or an input was given twice, or there are too many.
        """
        names = [one.name for one in self.engine.inputs if one.name not in self._pairs]
        given = arranged(names, feeds, inputs)
        return as_given(given, self.run(given), self.engine.outputs)

    def run(self, feeds: Mapping[str, Any], **options: Any) -> Outputs:
        """Run the engine on the other inputs.

        Args:
            feeds: as `Engine.run` takes them, without the state.
            **options: as `Engine.run` takes them, except for `outputs` and `as_dlpack`.

        Returns:
            All outputs, including the new state.

        Raises:
            EnginecastError: as `Engine.run`; the state does not change.
        """
        given = [name for name in self._pairs if name in feeds]
        if given:
            raise InputError(f"feeds: {given[0]!r} is state, which the stepper feeds by itself")
        outputs = self.engine.run({**feeds, **self.state}, **options)
        self.state = {
            name: outputs[output].astype(self._start[name].dtype, copy=False)
            for name, output in self._pairs.items()
        }
        return outputs

    def reset(self) -> None:
        """Return to the initial state."""
        self.state = dict(self._start)
