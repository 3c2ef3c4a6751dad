"""The reference of a bundle, made anew from the model."""

from collections.abc import Sequence

from enginecast.capture.source import Source
from enginecast.capture.wanted import UnknownOutputError
from enginecast.errors import UsageError
from enginecast.prepare import ModelOptions, open_model, prepare, reference_of
from enginecast.runtime.manifest import Input, Manifest, Output
from enginecast.scripted import prepare_script, reference_of_script
from enginecast.steps import Steps
from enginecast.verify.reference import Reference


def reference_of_model(
    model: str,
    manifest: Manifest,
    *,
    allow_code: bool = False,
    random_weights: int | None = None,
) -> tuple[Reference, tuple[str, ...]]:
    """Run eager over fresh verification inputs.

    Returns:
        The reference, and notes: that the model is not the one that the bundle was made from.

    Raises:
        UsageError: the model has other inputs or outputs than the engine.
    """
    chosen = tuple(spec.name for spec in manifest.outputs) if manifest.outputs_chosen else ()
    options = ModelOptions(
        random_weights=random_weights,
        allow_code=allow_code,
        outputs=chosen,
        # A specialised engine is compared on inputs that go its way.
        fallback="specialise" if manifest.guards else "torchscript",
    )
    source = open_model(model, options)
    if any(rung.name == "torchscript" for rung in manifest.capture):
        return _of_script(model, source, options, manifest)
    try:
        prepared = prepare(source, options, Steps())
    except UnknownOutputError as error:
        _check_names(source.name, "gives", error.given, manifest.outputs, manifest)
        raise
    inputs = [spec.name for spec in prepared.captured.inputs]
    _check_names(source.name, "takes", inputs, manifest.inputs, manifest)
    _check_names(source.name, "gives", prepared.model_outputs, manifest.outputs, manifest)
    reference = reference_of(prepared, manifest.precision)
    return reference, _same(model, source, manifest)


def _of_script(
    text: str, source: Source, options: ModelOptions, manifest: Manifest
) -> tuple[Reference, tuple[str, ...]]:
    """The same for an engine that was not made from a program of torch.export."""
    model = prepare_script(source, options, Steps())
    _check_names(source.name, "takes", [s.name for s in model.inputs], manifest.inputs, manifest)
    reference, notes = reference_of_script(model, manifest.precision)
    names = list(reference.cases[0].outputs)
    _check_names(source.name, "gives", names, manifest.outputs, manifest)
    return reference, (*notes, *_same(text, source, manifest))


def _same(text: str, source: Source, manifest: Manifest) -> tuple[str, ...]:
    """A note when it is another model that the bundle was made from."""
    if source.fingerprint() == manifest.model.fingerprint:
        return ()
    return (f"{text} is not the model that the bundle was made from",)


def _check_names(
    model: str,
    verb: str,
    names: Sequence[str],
    declared: Sequence[Input | Output],
    manifest: Manifest,
) -> None:
    """Refuse a model whose inputs or outputs are called otherwise: it is another model."""
    expected = [spec.name for spec in declared]
    if sorted(names) != sorted(expected):
        raise UsageError(
            f"--model {model} {verb} {', '.join(names)}, but the bundle's"
            f" engine {verb} {', '.join(expected)}",
            hint=f"The bundle was made from {manifest.model.name}.",
        )
