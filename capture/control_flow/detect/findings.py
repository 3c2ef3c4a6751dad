"""Findings about a model's Python code during capture: one `Finding` per source line.

Two sources observe the same model (the recorder of a run, and torch.export), and each may report a
line many times. `merge` makes one finding per line.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from enginecast.capture.python.locations import SourceLocation

Kind = Literal[
    # Python decides by a value.
    "if",
    "while",
    "for",
    "ternary",
    "assert",
    "comprehension",
    "try",
    "boolean",
    # A value leaves the tensor.
    "numpy",
    "tolist",
    "item",
    # A size depends on values.
    "index",
    # What a run or an export met without saying which of the above it is.
    "refused",
]
"""Ordered by priority: of several kinds on one line, the first is reported."""

Decides = Literal["inputs", "shapes", "weights", "unknown"]
"""What a predicate depends on; of several, the first in this order, since only "weights" can be
baked in.

"shapes" includes values computed only from shapes, such as position ids.
"""

Witness = Literal["recorder", "export"]

KINDS: tuple[str, ...] = get_args(Kind)
DECIDES: tuple[str, ...] = get_args(Decides)
WITNESSES: tuple[str, ...] = get_args(Witness)
SHOWN_PLACES = 3


@dataclass(frozen=True)
class Finding:
    """One source line that a capture fails at, or may fail at."""

    kind: Kind
    file: str
    line: int
    code: str
    """The text of that line."""
    function: str = ""
    """Qualified name of the function that holds the line."""
    module: str = ""
    """Dotted path of the first module whose forward met it; "" for the root."""
    tensor: str = ""
    """Source text of the deciding expression."""
    decides: Decides = "unknown"
    count: int = 1
    """How often it was met in one run."""
    witnesses: tuple[Witness, ...] = ()
    values: tuple[str, ...] = ()
    """Values that were seen."""
    action: str = ""
    """How the capture handles it."""
    is_blocking: bool = False
    """Whether it blocks the capture."""
    reason: str = ""
    """torch's message about it."""

    @property
    def place(self) -> SourceLocation:
        return SourceLocation(self.file, self.line)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        return {**found, "witnesses": list(self.witnesses), "ways": list(found.pop("values"))}


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for each line: blocking ones first, then in the order in which they were met.

    Counts of one source add up; of several sources the largest counts, since all of them saw the
    same run.
    """
    groups: dict[SourceLocation, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.place, []).append(finding)
    merged = [_union(group) for group in groups.values()]
    return sorted(merged, key=lambda finding: not finding.is_blocking)


def _union(group: list[Finding]) -> Finding:
    def rank(finding: Finding) -> tuple[bool, bool, int]:
        is_general = finding.kind == "refused"
        return is_general, not finding.is_blocking, KINDS.index(finding.kind)

    # What blocks names the line; a module or text that one witness lacks comes from another.
    first = min(group, key=rank)
    known: list[Decides] = [each.decides for each in group if each.decides != "unknown"]
    if first.decides != "unknown" and first.is_blocking:
        known = [each.decides for each in group if each.is_blocking]
    counts = Counter[tuple[object, ...]]()  # of each expression of the line in one source
    for each in group:
        counts[each.witnesses, each.kind, each.tensor] += each.count
    recorded = (each.module for each in group if "recorder" in each.witnesses)  # torch names none
    return replace(
        first,
        code=_first(each.code for each in group),
        function=first.function or _first(each.function for each in group),
        module=next(recorded, group[0].module),
        tensor=first.tensor or _first(each.tensor for each in group),
        decides=min(known, key=DECIDES.index, default="unknown"),
        count=max(counts.values()),
        witnesses=tuple(sorted({w for f in group for w in f.witnesses}, key=WITNESSES.index)),
        values=tuple(dict.fromkeys(value for each in group for value in each.values)),
        is_blocking=any(each.is_blocking for each in group),
        reason=_first(each.reason for each in group),
    )


def _first(texts: Iterable[str]) -> str:
    return next((text for text in texts if text), "")


def summarize(findings: Iterable[Finding]) -> str:
    """The blocking findings in one line: "3 places: a.py:7 if; b.py:9 while (197 times); ..."."""
    blocking = [finding for finding in findings if finding.is_blocking]
    if not blocking:
        return ""
    shown = [
        f"{finding.place.short} {finding.kind}"
        + (f" ({finding.count} times)" if finding.count > 1 else "")
        for finding in blocking[:SHOWN_PLACES]
    ]
    if len(blocking) > SHOWN_PLACES:
        shown.append(f"and {len(blocking) - SHOWN_PLACES} more")
    places = "1 place" if len(blocking) == 1 else f"{len(blocking)} places"
    return f"{places}: {'; '.join(shown)}"
