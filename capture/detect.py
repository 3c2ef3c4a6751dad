"""All that is known of a model's control flow: the witnesses' findings, united line by line.

The scan of the source costs nothing and is always asked. The recorder and Dynamo run the model, so
they are asked where a capture failed or the scan says that one will.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import nn

from enginecast.capture.dynamo_witness import DynamoVerdict
from enginecast.capture.findings import Decides, Finding, Kind, merge, summarise
from enginecast.capture.refusal import Refusal, explain
from enginecast.capture.scan import action, scan
from enginecast.errors import CaptureError


class Read(Protocol):
    """A tensor's value that Python read while the model ran."""

    @property
    def kind(self) -> str:
        """bool, item, int, float, index, tolist or numpy."""

    @property
    def file(self) -> str: ...

    @property
    def line(self) -> int: ...

    @property
    def code(self) -> str: ...

    @property
    def function(self) -> str: ...

    @property
    def module(self) -> str: ...

    @property
    def value(self) -> object: ...

    @property
    def decides(self) -> Decides: ...


OF_READS: dict[str, tuple[Kind, bool]] = {
    "item": ("item", False),
    "int": ("item", False),
    "float": ("item", False),
    "index": ("index", False),
    "tolist": ("tolist", True),
    "numpy": ("numpy", True),
}
"""Kind of finding of a read, and whether a capture needs something done about it."""
STATEMENTS: tuple[tuple[str, Kind], ...] = (
    (r"(el)?if\b", "if"),
    (r"while\b", "while"),
    (r"assert\b", "assert"),
    (r"(async\s+)?for\b", "for"),
    (r".*\sif\s.*\selse\s", "ternary"),
)


DONE = {
    "bake": "baked: it depends on weights alone",
    "strict": "captured by strict export",
    "rewrite": "rewritten to operators",
    "specialise": "one way, with a guard",
    "torchscript": "scripted",
}
"""What each rung of the ladder does about a branch."""


def detect(
    module: nn.Module,
    tensors: Collection[str],
    *,
    refusals: Iterable[Refusal] = (),
    reads: Sequence[Read] = (),
    verdict: DynamoVerdict | None = None,
    rung: str = "",
) -> list[Finding]:
    """One finding for each line that any witness names, blocking ones first.

    Args:
        module: on any device; it is not run.
        tensors: names of forward's tensor arguments.
        refusals: what torch.export refused.
        reads: what the recorder saw, over all inputs.
        verdict: of Dynamo.
        rung: of the ladder that captured the model all the same; empty where none did.
    """
    scanned = scan(module, tensors)
    refused: list[Finding] = []
    refusals = tuple(refusals)
    for refusal in refusals:
        if refusal.kind == "specialized-dimension" and not refusal.file:
            scanned = _blame_shapes(scanned, refusal)
        refused.append(of_refusal(refusal))
    if any("export" in each.witnesses for each in scanned):
        refused = [each for each in refused if each.file]
    found = merge(
        [*scanned, *map(of_read, reads), *refused, *(verdict.findings if verdict else ())]
    )
    is_refused = bool(refusals) and not rung
    return [replace(each, action=_action(each, rung, is_refused=is_refused)) for each in found]


def of_read(read: Read) -> Finding:
    """A read of a value, as the recorder saw it, as a finding."""
    kind, is_blocking = OF_READS.get(read.kind, (_of_statement(read.code, "boolean"), True))
    return Finding(
        kind=kind,
        file=read.file,
        line=read.line,
        code=read.code,
        function=read.function,
        module=read.module,
        tensor="",
        decides=read.decides,
        witnesses=("recorder",),
        ways=(str(read.value),),
        is_blocking=is_blocking,
    )


def of_refusal(refusal: Refusal) -> Finding:
    """A refusal of torch.export as a finding; without a line where torch names none."""
    is_branch = refusal.kind == "data-dependent-branch"
    return Finding(
        kind=_of_statement(refusal.code, "refused") if is_branch else "refused",
        file=refusal.file,
        line=refusal.line,
        code=refusal.code,
        function="",
        module="",
        tensor="",
        decides="shapes" if refusal.kind == "specialized-dimension" else "unknown",
        witnesses=("export",),
        is_blocking=True,
        reason=refusal.detail,
    )


def add_findings(error: CaptureError, module: nn.Module, tensors: Collection[str]) -> None:
    """Make a refusal name all places at once, where torch stops at the first."""
    cause = error.__cause__
    refusals = [] if cause is None else [explain(cause)]
    findings = detect(module, tensors, refusals=refusals)
    error.details["control_flow"] = [each.to_json() for each in findings]
    summary = summarise(each for each in findings if each.file)
    if summary:
        error.message = f"{error.message}\n{summary}"


def _blame_shapes(scanned: list[Finding], refusal: Refusal) -> list[Finding]:
    """Torch names no line where a size was fixed: it is one of those that shapes decide."""
    return [
        replace(
            each,
            is_blocking=True,
            witnesses=(*each.witnesses, "export"),
            reason=refusal.reason,
        )
        if each.decides == "shapes" and each.kind != "not-scanned"
        else each
        for each in scanned
    ]


def _of_statement(code: str, otherwise: Kind) -> Kind:
    """The kind of statement that a line of code begins."""
    return next((kind for pattern, kind in STATEMENTS if re.match(pattern, code)), otherwise)


def _action(finding: Finding, rung: str, *, is_refused: bool) -> str:
    if finding.kind == "not-scanned" and finding.action:
        return finding.action
    if finding.is_blocking and is_refused:
        return "refused"
    if not finding.is_blocking or not rung:
        return action(finding)
    if finding.kind == "state":
        return "kept as it was when traced"
    if finding.decides == "shapes" and rung in ("export", "bake", "strict"):
        return "follows the sizes of the trace"
    is_baked = rung == "bake" and finding.decides == "weights"
    return DONE[rung] if rung in DONE and (is_baked or rung != "bake") else "none: captured"
