"""Which extra of the package brings a library that is not installed."""

from enginecast.errors import MissingError

EXTRAS = {
    "torch": "export",
    "sympy": "export",
    "transformers": "export",
    "huggingface_hub": "export",
    "onnx": "export",
    "onnxscript": "export",
    "onnx_ir": "export",
    "diffusers": "diffusers",
    "accelerate": "diffusers",
    "pyarrow": "cache",
    "datasets": "cache",
    "ray": "ray",
    "model_signing": "signing",
    "matplotlib": "bench",
}
"""Libraries by the names that they are imported under."""


def missing_extra(error: ModuleNotFoundError, doing: str) -> MissingError | None:
    """What to raise for a library that an extra brings; None: no extra does.

    Args:
        doing: what needs it, such as "enginecast export".
    """
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        return None
    extra = EXTRAS[library]
    return MissingError(
        f"{doing} needs {library}, which is not installed",
        hint=f"pip install 'enginecast[{extra}]'",
    )
