"""Why torch.export refused a model: the line of the user's code, the reason, and what to do.

The facts are those of torch 2.13: a non-strict export names the culprit in the traceback, dynamo
and constraint violations in the text of the message.
"""

import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from enginecast.capture.python.locations import (
    SourceLocation,
    is_model_code,
    origin_of,
)
from enginecast.capture.refusals.constraints import culprit, violations

Kind = Literal[
    "data-dependent-branch",
    "data-dependent-size",
    "data-leaves-torch",
    "specialized-dimension",
    "unsupported-output",
    "unsupported-python",
    "operator",
    "model-error",
]

REASONS: dict[Kind, tuple[str, str]] = {
    "data-dependent-branch": (
        "a Python branch or loop depends on the value of a tensor",
        "Rewrite it with torch.where or torch.cond, or decide it before the export.",
    ),
    "data-dependent-size": (
        "a size or index depends on the value of a tensor",
        "Bound it with torch._check, or compute it from shapes.",
    ),
    "data-leaves-torch": (
        "a tensor's values are read by Python (.tolist(), .numpy(), float(x))",
        "Stay with tensor operations.",
    ),
    "specialized-dimension": (
        "the model's code does not take all sizes of a dimension that was to vary",
        "Narrow or fix it: --dynamic NAME:DIM=MIN..MAX or --dynamic NAME:DIM=K.",
    ),
    "unsupported-output": (
        "the model returns an object that is no tensor or container of tensors",
        "Return tensors in tuples, dicts or dataclasses; switch caches off.",
    ),
    "unsupported-python": (
        "the code uses Python that torch.export cannot follow",
        "Write it with tensor operations, or move it out of forward.",
    ),
    "operator": (
        "an operator refuses the shapes or dtypes of its inputs",
        "Check the example inputs: --inputs FILE.safetensors.",
    ),
    "model-error": (
        "the model's own code raised an error",
        "Check the example inputs: --inputs FILE.safetensors.",
    ),
}

BY_CLASS: dict[str, Kind] = {
    "GuardOnDataDependentSymNode": "data-dependent-branch",
    "UserErrorDynamicControlFlow": "data-dependent-branch",
    "PendingUnbackedSymbolNotFound": "data-dependent-size",
    "DynamicOutputShapeException": "data-dependent-size",
    "DataDependentOutputException": "data-leaves-torch",
    "ConstraintViolationError": "specialized-dimension",
    "UnsupportedOperatorException": "operator",
    "UnsupportedFakeTensorException": "operator",
    "TorchRuntimeError": "operator",
    "Unsupported": "unsupported-python",
}

BY_TEXT: tuple[tuple[str, Kind], ...] = (
    # Older torch says it so, and people still paste it into reports.
    ("dynamic control flow is not supported", "data-dependent-branch"),
    ("Data-dependent branching", "data-dependent-branch"),
    ("Could not guard on data-dependent expression", "data-dependent-branch"),
    ("Could not extract specialized integer", "data-dependent-size"),
    ("Constraints violated", "specialized-dimension"),
    ("not a known type", "unsupported-output"),
    ("pytree-able", "unsupported-output"),
    (".tolist() is not supported", "data-leaves-torch"),
    (".numpy() is not supported", "data-leaves-torch"),
    ("Cannot access data pointer", "data-leaves-torch"),
)

SAYS_NOTHING: frozenset[Kind] = frozenset({"operator", "model-error"})
"""Kinds of which the reason is too general to stand alone."""
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class Refusal:
    """One refusal, fit for a message and for deciding what to try next."""

    kind: Kind
    file: str
    """The user's file; empty when torch names none."""
    line: int
    code: str
    """The text of that line."""
    reason: str
    hint: str
    detail: str
    """First lines of torch's own message."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def in_full(self) -> str:
        """The reason and torch's own message."""
        return f"{self.reason} ({self.detail})"

    @property
    def in_short(self) -> str:
        """The reason, with torch's own message only where the reason alone says nothing."""
        return self.in_full if self.kind in SAYS_NOTHING else self.reason

    def message(self) -> str:
        """The refusal in words, without the hint."""
        code = self.code or "(the source of this line is not available)"
        where = f" at {self.place}\n    {code}\n" if self.file else ": "
        return f"torch.export refused the model{where}{self.in_full}"


def explain(error: BaseException) -> Refusal:
    """Explain an exception that torch.export raised; looks at it and changes nothing."""
    chain = list(_chain(error))
    kinds = [kind for kind in map(_kind, chain) if kind is not None]
    kind: Kind = kinds[0] if kinds else "model-error"
    places = [_place(link) for link in chain]
    if kind == "specialized-dimension":
        places = [culprit(link) for link in chain] + places
    file, line = next((place for place in places if place is not None), ("", 0))
    reason, hint = REASONS[kind]
    told = violations(str(error))
    if kind == "specialized-dimension" and told:
        reason = f"{reason}: {told}"
    fixes = re.search(r"Suggested fixes:\s*\n((?:[ \t]+\S.*\n?)+)", str(error))
    if kind == "specialized-dimension" and fixes:
        reason = f"{reason}; torch suggests {' '.join(fixes[1].split())}"
    code = linecache.getline(file, line).strip() if file else ""
    return Refusal(kind, file, line, code, reason, hint, _detail(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised from."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _kind(error: BaseException) -> Kind | None:
    message = str(error).lower()
    for text, kind in BY_TEXT:
        if text.lower() in message:
            return kind
    for base in type(error).__mro__:
        if base.__name__ in BY_CLASS:
            return BY_CLASS[base.__name__]
    return None


def _place(error: BaseException) -> SourceLocation | None:
    """The innermost line of code that is neither torch's, Python's, nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    _, _, quoted = str(error).partition("from user code")
    quoted_frames = [
        SourceLocation(match["file"], int(match["line"])) for match in FRAME.finditer(quoted)
    ]
    places = [*reversed(quoted_frames), *reversed(_within_torch(frames))]
    known = (place for place in places if is_model_code(place.file))
    return next(known, None) or next((p for p in places if origin_of(p.file) == "exec"), None)


def _within_torch(frames: Sequence[traceback.FrameSummary]) -> list[SourceLocation]:
    """The frames from torch's first one on: those before it are who asked for the export."""
    places = [SourceLocation.of_summary(frame) for frame in frames]
    first = next((i for i, place in enumerate(places) if origin_of(place.file) == "torch"), 0)
    return places[first:]


def _detail(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first[:200]}"
