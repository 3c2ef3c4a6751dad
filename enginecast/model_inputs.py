"""Which inputs a model takes, and which of them were given."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from enginecast.capture.derive import check_required, derive
from enginecast.capture.dynamic import apply_dynamic, parse_dynamic
from enginecast.capture.given import check_arguments, read_inputs
from enginecast.capture.inputs import InputSpec, captured_dtype, from_example
from enginecast.capture.source import Source
from enginecast.cases import check_values
from enginecast.errors import UsageError


def input_specs(
    source: Source, inputs: Path | None, dynamic: Sequence[str]
) -> tuple[tuple[InputSpec, ...], dict[str, Tensor]]:
    """The inputs that a program of `source` will take, and those that were given.

    Args:
        inputs: safetensors with example inputs by name.
        dynamic: NAME:DIM=MIN..MAX, each.

    Raises:
        SourceError, UsageError: the inputs or sizes do not fit the model.
    """
    if source.given_program() is not None:
        return (), {}
    specs, given = _inputs(source, inputs)
    return apply_dynamic(specs, [parse_dynamic(text) for text in dynamic]), given


def _inputs(source: Source, file: Path | None) -> tuple[tuple[InputSpec, ...], dict[str, Tensor]]:
    if file is None:
        _check_example(source)
        return derive(source), {}
    given = read_inputs(file)
    _check_filled(given, file)
    check_arguments(given, source, f"--inputs {file}")
    ordered = sorted(given, key=_position(source))
    given = {name: given[name].to(captured_dtype(given[name])) for name in ordered}
    specs = check_required(source, from_example(given, source.config))
    check_values(given, specs, f"--inputs {file}")
    return specs, given


def _check_filled(given: Mapping[str, Tensor], file: Path) -> None:
    for name, tensor in given.items():
        if not tensor.numel():
            raise UsageError(
                f"--inputs {file}: {name}: expected values, got shape {list(tensor.shape)}"
            )


def _check_example(source: Source) -> None:
    parameters = source.forward_signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_arguments(source.example(), source, "the example")


def _position(source: Source) -> Callable[[str], int]:
    """Where an input stands in the model's forward: a safetensors file sorts by name."""
    order = {name: index for index, name in enumerate(source.forward_arguments)}
    return lambda name: order.get(name, len(order))
