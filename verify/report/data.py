"""What a report is made of: plain data, filled by the driver, printed and written by `report`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from enginecast.runtime.bundle.manifest import Fusion, Verdict
from enginecast.verify.emulate.data import Emulation


@dataclass(frozen=True)
class PassCheck:
    """One pass: what it did, and what the comparison after it found."""

    name: str
    promise: str
    rewritten: int
    left_alone: int
    seconds: float
    """That the pass took."""
    check_seconds: float
    """That the comparison took."""
    worst_place: str
    """Module path, or "output 'NAME'": the first failing place, or the one with the largest error
    in floors."""
    worst_source: str
    worst_error: float | None
    """None: values there are infinite or NaN, since this pass or one before it, and finite in
    fp64."""
    worst_ratio: float | None
    """Error over floor; 0 for a value that is bit-equal; None as above."""
    modules: Mapping[str, float | None] = field(default_factory=dict)
    """Module path -> relative L2 error against fp64 after the pass; for "exact" the change from
    before; None as above."""
    moved: tuple[str, ...] = ()
    """Modules whose last value is another one since this pass."""
    failure: str = ""
    """Why the pass broke its promise; empty when it did not."""


@dataclass(frozen=True)
class Report:
    """An export, or a verification, for people and for programs."""

    model: str
    target: str
    precision: str
    pipeline: str
    verdict: Verdict
    floor_dtype: str
    passes: tuple[PassCheck, ...] = ()
    emulation: Emulation | None = None
    """The program in the arithmetic of the target; None for fp32."""
    fusions: tuple[Fusion, ...] = ()
    left_out: tuple[str, ...] = ()
    """Cases that were verified but are not stored in the bundle."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Step -> time: capture, passes, lower, verify, ..."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Step -> most bytes of memory that no file backs; 0 where the system does not report it."""
    notes: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    """What the engine consists of, as its runtime reports it: fusions that were kept, dtypes."""
    others: Mapping[str, Verdict] = field(default_factory=dict)
    """Verdicts on further engines in the bundle, by target."""
    speed: str = ""
    """How fast the engine was beside eager where it was made; empty: it was not timed."""
