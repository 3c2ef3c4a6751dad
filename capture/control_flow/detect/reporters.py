"""What the recorder and torch.export report of a model's control flow, merged line by line.

The recorder reports what Python reads in a run; torch.export what it refused and where its trace
branched on sizes.
"""

import itertools
import linecache
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from enginecast.capture.control_flow.detect.findings import Finding, Kind, merge
from enginecast.capture.control_flow.detect.recorder import Read
from enginecast.capture.control_flow.detect.statements import numbers_decide, statement_at
from enginecast.capture.python.locations import SourceLocation, is_library_code
from enginecast.capture.refusals.explain import Refusal

OF_READS: dict[str, tuple[Kind, bool]] = {
    "bool": ("boolean", True),
    "item": ("item", False),
    "int": ("item", False),
    "float": ("item", False),
    "index": ("index", False),
    "tolist": ("tolist", True),
    "numpy": ("numpy", True),
    "compare": ("boolean", True),
}
"""Kind of finding for a read, and whether it blocks a capture."""
DONE = {
    "bake": "baked: it depends on weights alone",
    "strict": "captured by strict export",
    "rewrite": "rewritten to operators",
    "specialise": "one path, with a guard",
    "torchscript": "scripted",
}
"""How each capture strategy handles a branch."""


def detect(
    *,
    refusals: Iterable[Refusal] = (),
    runs: Sequence[Sequence[Read]] = (),
    decided: Collection[SourceLocation] = (),
    branches: Collection[SourceLocation] = (),
    rung: str = "",
) -> list[Finding]:
    """One finding for each line that any source names, blocking ones first.

    Args:
        refusals: refusals of torch.export.
        runs: the recorder's reads, by run.
        decided: where torch.export's trace branched on a symbolic number.
        branches: where control flow became an operator.
        rung: the capture strategy that succeeded anyway; empty if none did.
    """
    refused = [of_refusal(refusal) for refusal in refusals]
    found = merge(
        [
            *of_runs(runs),
            *refused,
            *(of_trace(place, is_blocking=False) for place in decided),
            *(of_trace(place, is_blocking=True) for place in branches),
        ]
    )
    is_refused = bool(refused) and not rung
    return [replace(each, action=_action(each, rung, is_refused=is_refused)) for each in found]


def overlooked(
    runs: Sequence[Sequence[Read]], decided: Collection[SourceLocation]
) -> tuple[SourceLocation, ...]:
    """Lines where a run branches on inputs although torch.export did not refuse them.

    Code can evade a capture: it swallows torch's refusal (`try`, `suppress`), or asks whether it is
    being compiled, or for the type of a number. torch.export does not report the other path.
    """
    places: dict[SourceLocation, None] = {}
    for read in itertools.chain(*runs):
        if read.decides == "inputs" and not is_library_code(read.file):
            if read.kind not in ("tolist", "numpy"):  # of these, sizes tell how often a loop runs
                places[read.place] = None
            places |= dict.fromkeys(numbers_decide(read.place))
    return tuple(place for place in places if statement_at(place) and place not in decided)


def _at(place: SourceLocation, kind: Kind, **known: Any) -> Finding:
    """A finding; where the line branches, of that kind."""
    kind, tensor = statement_at(place) or (kind, "")
    code = linecache.getline(*place).strip() if place.file else ""
    return Finding(kind, *place, **{"code": code, "tensor": tensor, **known})


def of_runs(runs: Sequence[Sequence[Read]]) -> Iterator[Finding]:
    """What the recorder saw, each line with the most reads of one run."""
    counts = [Counter(read.place for read in run) for run in runs]
    findings = []
    for read in itertools.chain(*runs):
        kind, is_blocking = OF_READS[read.kind]
        known = {"code": read.code, "function": read.function, "module": read.module}
        found = _at(read.place, kind, **known, decides=read.decides, witnesses=("recorder",))
        if read.kind in ("tolist", "numpy"):
            found = replace(found, kind=kind, tensor="")
        is_blocking = is_blocking or statement_at(read.place) is not None
        findings.append(replace(found, values=(str(read.value),), is_blocking=is_blocking))
    for found in merge(findings):
        yield replace(found, count=max(count[found.place] for count in counts))


def of_refusal(refusal: Refusal) -> Finding:
    """What torch.export refused; without a line if it names none."""
    return _at(
        SourceLocation(refusal.file, refusal.line),
        "refused",
        code=refusal.code,
        decides="shapes" if refusal.kind == "specialized-dimension" else "unknown",
        witnesses=("export",),
        is_blocking=True,
        reason=refusal.detail or refusal.reason,
    )


def of_trace(place: SourceLocation, *, is_blocking: bool) -> Finding:
    """Where a trace of torch.export branched on a size."""
    return _at(place, "boolean", decides="shapes", witnesses=("export",), is_blocking=is_blocking)


def _action(finding: Finding, rung: str, *, is_refused: bool) -> str:
    if not finding.is_blocking:
        return "none: captured"
    if is_refused:
        return "refused"
    if finding.decides == "shapes" and rung in ("export", "bake", "strict"):
        return "follows the sizes of the trace"
    is_baked = rung == "bake" and finding.decides == "weights"
    return DONE[rung] if rung in DONE and (is_baked or rung != "bake") else "none: captured"
