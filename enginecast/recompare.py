"""The reference of a bundle, made anew from the model."""

from enginecast.capture.outputs import named_tensors
from enginecast.prepare import ModelOptions, open_model, prepare
from enginecast.runtime.manifest import Manifest
from enginecast.steps import Steps
from enginecast.verify.floor import make_reference
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
    """
    options = ModelOptions(random_weights=random_weights, allow_code=allow_code)
    prepared = prepare(open_model(model, options), options, Steps())
    reference = make_reference(
        prepared.captured.program,
        prepared.source.eager,
        prepared.cases,
        dtype=manifest.precision,
        names=prepared.output_names,
        forward=lambda module, inputs: named_tensors(module(**inputs)),
        mask_input=prepared.mask_input,
    )
    if prepared.source.fingerprint() == manifest.model.fingerprint:
        return reference, ()
    return reference, (f"{model} is not the model that the bundle was made from",)
