"""The reference of a bundle, made anew from the model."""

from enginecast.errors import UsageError
from enginecast.prepare import ModelOptions, Prepared, open_model, prepare, reference_of
from enginecast.runtime.manifest import Manifest
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
    options = ModelOptions(random_weights=random_weights, allow_code=allow_code)
    prepared = prepare(open_model(model, options), options, Steps())
    _check_signature(prepared, manifest)
    reference = reference_of(prepared, manifest.precision)
    if prepared.source.fingerprint() == manifest.model.fingerprint:
        return reference, ()
    return reference, (f"{model} is not the model that the bundle was made from",)


def _check_signature(prepared: Prepared, manifest: Manifest) -> None:
    """Refuse a model whose inputs or outputs are called otherwise: it is another model."""
    pairs = (
        ("takes", [spec.name for spec in prepared.captured.inputs], manifest.inputs),
        ("gives", list(prepared.output_names), manifest.outputs),
    )
    for verb, names, declared in pairs:
        expected = [spec.name for spec in declared]
        if sorted(names) != sorted(expected):
            raise UsageError(
                f"--model {prepared.source.name} {verb} {', '.join(names)}, but the bundle's"
                f" engine {verb} {', '.join(expected)}",
                hint=f"The bundle was made from {manifest.model.name}.",
            )
