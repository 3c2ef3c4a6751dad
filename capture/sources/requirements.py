"""Errors of a user's code that say what this machine lacks: a GPU, or a package."""

import torch

from enginecast.errors import EnginecastError, MissingError

_NO_CUDA = (
    "torch not compiled with cuda enabled",
    "pytorch is not linked with support for cuda",
    "found no nvidia driver",
    "no cuda gpus are available",
    "no cuda-capable device",
    "cuda driver initialization failed",
)


def missing_requirement(error: BaseException, who: str) -> EnginecastError | None:
    """The error to tell a user when the model's code wants what is not here; None: another cause.

    Args:
        error: what the user's code raised.
        who: whose code it is, to begin the sentence with.
    """
    link: BaseException | None = error
    while link is not None:
        text = str(link).lower()
        if any(phrase in text for phrase in _NO_CUDA) and not torch.cuda.is_available():
            return MissingError(
                f"{who} needs a CUDA GPU, and this machine has none: {link}",
                hint="Build the model on the CPU; what the engine runs on is said with --device.",
            )
        if isinstance(link, ModuleNotFoundError) and link.name:
            return MissingError(
                f"{who} needs the package {link.name.partition('.')[0]!r}, which is not installed",
                hint="Install it in this environment.",
            )
        link = link.__cause__ or link.__context__
    return None
