"""Every error a user can meet.

    EnginecastError                exit code
    ├── UsageError                 2   an option or argument that does not fit
    ├── SourceError                2   the model: folder, config, weights, factory
    ├── CaptureError               2   torch.export refused the model
    ├── SpecError                  2   the text of a pipeline
    ├── PassError                  2   a pass that cannot run on this program
    │   └── PassDefectError       70   a pass that raised, or left a program that is not valid
    ├── LoweringError              2   the target cannot express this program
    ├── BundleError                2   a bundle on disk: missing, damaged, in the way
    ├── InputError                 2   what was fed to an engine
    ├── CacheError                 2   an embedding cache: missing, damaged, of another spec
    │   ├── CacheMissError         2   a text that an embedding cache does not hold
    │   └── CacheVersionError      2   an embedding cache that another version wrote
    ├── StoppedError               3   a run that was canceled, or took longer than it may
    ├── VerificationError          1   the result does not agree with eager, or lacks something
    ├── DefectError               70   a defect of a package that adds passes or targets
    │   └── PassDefectError       70   (above)
    └── MissingError               3   a package, GPU, provider, disk or memory that is lacking here

A message names the file or field, what was expected and what was got; `hint` says what to do next.
"""

from typing import Any, ClassVar

__all__ = [
    "BundleError",
    "CacheError",
    "CacheMissError",
    "CacheVersionError",
    "CaptureError",
    "DefectError",
    "EnginecastError",
    "EnginecastWarning",
    "InputError",
    "LoweringError",
    "MissingError",
    "PassDefectError",
    "PassError",
    "SourceError",
    "SpecError",
    "StoppedError",
    "UsageError",
    "VerificationError",
]


def __dir__() -> list[str]:  # as `public.listing`, which would import this module in a circle
    return list(__all__)


LONGEST = 20_000
"""Characters of a message: a name of a file that somebody made may have millions."""


class EnginecastError(Exception):
    """Base of all errors of this package.

    Args:
        message: what is wrong: the file or field, what was expected, what was got.
        hint: what to do about it, as one sentence; may be empty.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        message = shortened(message, LONGEST)
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: dict[str, Any] = {}
        """What `--json` gives besides the message."""

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class EnginecastWarning(UserWarning):
    """Something about a model or an engine that its user should know."""


def shortened(text: str, most: int = 200) -> str:
    """A text, without its middle where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} more characters) ... {text[-half:]}"


def first_line(error: BaseException) -> str:
    """The first line of what an error says; of one that says nothing, its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class UsageError(EnginecastError):
    """An option or argument that does not fit."""


class SourceError(EnginecastError):
    """The model could not be read: folder, config, weights, factory."""


class CaptureError(EnginecastError):
    """torch.export refused the model."""


class SpecError(EnginecastError):
    """The text of a pipeline is wrong; the message points at the place."""


class PassError(EnginecastError):
    """A pass cannot run on this program, or broke it."""


class DefectError(EnginecastError):
    """A package that adds passes or targets has a defect; the message names its file and line.

    `details` has the package, and the file and line where they are known.
    """

    exit_code = 70
    """EX_SOFTWARE of sysexits.h."""
    trace: str = ""
    """The lines of that package that led there, as in a traceback; empty: none is known."""


class PassDefectError(DefectError, PassError):
    """A pass raised what it should not, or left a program that is not valid."""


class LoweringError(EnginecastError):
    """The target cannot express this program."""


class BundleError(EnginecastError):
    """A bundle on disk is missing, damaged, or in the way."""


class InputError(EnginecastError):
    """What was fed to an engine does not fit its signature."""


class CacheError(EnginecastError):
    """An embedding cache is missing, damaged, or made for another encoder, template or version."""


class CacheVersionError(CacheError):
    """An embedding cache was written by another version, and is not damaged."""


class CacheMissError(CacheError):
    """A text that an embedding cache does not hold; the message names the nearest cause."""


class VerificationError(EnginecastError):
    """The result does not agree with eager, or lacks what was asked for; nothing was published."""

    exit_code = 1


class StoppedError(EnginecastError):
    """A run of an engine was canceled, or did not end in the time that it was given."""

    exit_code = 3


class MissingError(EnginecastError):
    """A package, GPU or provider that this machine lacks, or too little disk or memory."""

    exit_code = 3
