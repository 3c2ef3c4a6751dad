"""Findings about a model's Python code during capture: one `Finding` per source line.

Several witnesses look at the same model (the recorder of a run, torch.export, Dynamo), and each of
them may meet a line many times.  `merge` makes one finding of all that they say of a line.
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
    "graph-break",
    "refused",
]
"""Ordered: of several that are met on one line, the first names it."""

Decides = Literal["inputs", "shapes", "weights", "unknown"]
"""What a predicate depends on; of several the first one, since only "weights" alone can be baked.

"shapes" includes values that are made from shapes alone, such as position ids.
"""

Witness = Literal["recorder", "export", "dynamo"]

KINDS: tuple[str, ...] = get_args(Kind)
DECIDES: tuple[str, ...] = get_args(Decides)
WITNESSES: tuple[str, ...] = get_args(Witness)
SHOWN_PLACES = 3


@dataclass(frozen=True)
class Finding:
    """One source line at which a capture stumbles, or might."""

    kind: Kind
    file: str
    line: int
    code: str
    """The text of that line."""
    function: str = ""
    """Qualified name of the function that holds the line."""
    module: str = ""
    """Dotted path of the module whose forward it was met in, the first of them; "" for the root."""
    tensor: str = ""
    """Source text of the expression that decides."""
    decides: Decides = "unknown"
    count: int = 1
    """How often it was met in one run."""
    witnesses: tuple[Witness, ...] = ()
    values: tuple[str, ...] = ()
    """Values that were seen."""
    action: str = ""
    """What is done about it."""
    is_blocking: bool = False
    """Whether capture needs something done about it."""
    reason: str = ""
    """What torch says of it, in torch's words."""

    @property
    def place(self) -> SourceLocation:
        return SourceLocation(self.file, self.line)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        return {**found, "witnesses": list(self.witnesses), "ways": list(found.pop("values"))}


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for each line: blocking ones first, then in the order in which they were met.

    Within one witness the counts add up; between witnesses the largest stands, since all of them
    saw the same run.
    """
    groups: dict[SourceLocation, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.place, []).append(finding)
    merged = [_union(group) for group in groups.values()]
    return sorted(merged, key=lambda finding: not finding.is_blocking)


def _union(group: list[Finding]) -> Finding:
    # What blocks names the line; a module or text that one witness lacks comes from another.
    first = min(group, key=_rank)
    known: list[Decides] = [each.decides for each in group if each.decides != "unknown"]
    if first.decides != "unknown" and first.is_blocking:
        known = [each.decides for each in group if each.is_blocking]
    return replace(
        first,
        code=_first(each.code for each in group),
        function=first.function or _first(each.function for each in group),
        module=_module(group),
        tensor=first.tensor or _first(each.tensor for each in group),
        decides=min(known, key=DECIDES.index, default="unknown"),
        count=_count(group),
        witnesses=tuple(sorted({w for f in group for w in f.witnesses}, key=WITNESSES.index)),
        values=tuple(dict.fromkeys(value for each in group for value in each.values)),
        is_blocking=any(each.is_blocking for each in group),
        reason=_first(each.reason for each in group),
    )


def _rank(finding: Finding) -> tuple[bool, bool, int]:
    is_general = finding.kind in ("graph-break", "refused")
    return (is_general, not finding.is_blocking, KINDS.index(finding.kind))


def _module(group: list[Finding]) -> str:
    """The first module path; what torch says names none."""
    named = (each.module for each in group if "recorder" in each.witnesses)
    return next(named, group[0].module)


def _first(texts: Iterable[str]) -> str:
    return next((text for text in texts if text), "")


def _count(group: list[Finding]) -> int:
    """Met by one witness at different expressions of the line: the most that one was met."""
    counts = Counter[tuple[object, ...]]()
    for each in group:
        counts[each.witnesses, each.kind, each.tensor] += each.count
    return max(counts.values())


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
