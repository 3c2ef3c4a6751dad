"""All findings about a model's control flow, merged line by line.

The recorder reports what Python reads in a run; torch.export what it refused and where its trace
branched on sizes; Dynamo where the graph breaks.
"""

import copy
import itertools
import linecache
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.findings import Finding, Kind, Witness, merge
from enginecast.capture.control_flow.detect.recorder import Read
from enginecast.capture.control_flow.detect.statements import numbers_decide, statement_at
from enginecast.capture.python.locations import SourceLocation, is_library_code, is_model_code
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.refusals.refusal import Refusal, explain
from enginecast.library_names import private

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
    breaks: Iterable[Finding] = (),
    rung: str = "",
) -> list[Finding]:
    """One finding for each line that any source names, blocking ones first.

    Args:
        refusals: refusals of torch.export.
        runs: the recorder's reads, by run.
        decided: where torch.export's trace branched on a symbolic number.
        branches: where control flow became an operator.
        breaks: graph breaks of Dynamo.
        rung: the capture strategy that succeeded anyway; empty if none did.
    """
    refused = [of_refusal(refusal) for refusal in refusals]
    found = merge(
        [
            *_of_runs(runs),
            *refused,
            *(_of_trace(place, is_blocking=False) for place in decided),
            *(_of_trace(place, is_blocking=True) for place in branches),
            *breaks,
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


def _of_runs(runs: Sequence[Sequence[Read]]) -> Iterator[Finding]:
    counts = [Counter(read.place for read in run) for run in runs]
    for found in merge(of_read(read) for run in runs for read in run):
        yield replace(found, count=max(count[found.place] for count in counts))


def of_read(read: Read) -> Finding:
    """The finding for a recorded read."""
    kind, is_blocking = OF_READS[read.kind]
    statement = None if read.kind in ("tolist", "numpy") else statement_at(read.place)
    kind, tensor = statement or (kind, "")
    return Finding(
        kind,
        read.file,
        read.line,
        read.code,
        function=read.function,
        module=read.module,
        tensor=tensor,
        decides=read.decides,
        witnesses=("recorder",),
        values=(str(read.value),),
        is_blocking=is_blocking or statement is not None,
    )


def of_refusal(refusal: Refusal) -> Finding:
    """The finding for a refusal of torch.export; without a line if torch names none."""
    place = SourceLocation(refusal.file, refusal.line)
    kind, tensor = statement_at(place) or ("refused", "")
    is_shape = refusal.kind == "specialized-dimension"
    return Finding(
        kind,
        refusal.file,
        refusal.line,
        refusal.code,
        tensor=tensor,
        decides="shapes" if is_shape else "unknown",
        witnesses=("export",),
        is_blocking=True,
        reason=refusal.detail or refusal.reason,
    )


def _of_trace(place: SourceLocation, *, is_blocking: bool) -> Finding:
    kind, tensor = statement_at(place) or ("boolean", "")
    return Finding(
        kind,
        *place,
        linecache.getline(*place).strip(),
        tensor=tensor,
        decides="shapes",
        witnesses=("export",),
        is_blocking=is_blocking,
    )


def _action(finding: Finding, rung: str, *, is_refused: bool) -> str:
    if not finding.is_blocking:
        return "none: captured"
    if is_refused:
        return "refused"
    if finding.decides == "shapes" and rung in ("export", "bake", "strict"):
        return "follows the sizes of the trace"
    is_baked = rung == "bake" and finding.decides == "weights"
    return DONE[rung] if rung in DONE and (is_baked or rung != "bake") else "none: captured"


def ask_dynamo(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Finding, ...]:
    """Run a copy of `module` under Dynamo; never raises, and leaves no compiled code behind.

    `torch._dynamo.explain` counts graphs, but 0 graphs and -1 breaks are what it counts when it
    gives up on a function with a loop or `try`: a model that is anything but one graph.

    Args:
        module: with real weights; the copy shares its parameters, and has its own buffers.
        inputs: example inputs by argument name; they are copied.

    Returns:
        The lines at which it breaks, one without a line if it names none; empty for one graph.
    """
    try:
        with _alone():
            explain = private("torch._dynamo.explain", "Dynamo's account")
            found = explain(private_copy(module))(**_clones(inputs))
    except Exception as error:  # Dynamo raises many kinds, and the model any
        return (_of_error(error, "explain failed"),)
    breaks = [_of_break(reason) for reason in found.break_reasons]
    if found.graph_count == 1 and not breaks:
        return ()
    if found.graph_count > 1 and any(each.file for each in breaks):
        return tuple(merge(breaks))
    try:  # asked for one graph, it has no other answer than yes or an error
        with _alone():
            torch.compile(private_copy(module), backend="eager", fullgraph=True)(**_clones(inputs))
    except Exception as error:
        # Of a function that it gave up on, the reasons are those of the functions within.
        return tuple(merge([_of_error(error, "not one graph"), *breaks]))
    return ()


@contextmanager
def _alone() -> Iterator[None]:
    """Dynamo with an empty cache, and symbols for numbers read out of tensors."""
    config = private("torch._dynamo.config", "Dynamo's account")
    torch.compiler.reset()
    try:
        with (
            quiet_torch(),
            warnings.catch_warnings(),
            torch.no_grad(),
            config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compiler.reset()


def private_copy(module: nn.Module) -> nn.Module:
    """A copy whose buffers and attributes may be written to; it shares large parameters."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    return copy.deepcopy(module, shared)


def _clones(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _of_error(error: Exception, what: str) -> Finding:
    refusal = explain(error)
    return _broken(
        SourceLocation(refusal.file, refusal.line), f"{what}: {refusal.detail or refusal.reason}"
    )


def _of_break(reason: Any) -> Finding:
    stack: Sequence[Any] = reason.user_stack or ()
    frames = [frame for frame in stack if is_model_code(frame.filename)]
    said = next((line.strip() for line in str(reason.reason).splitlines() if line.strip()), "")
    if not frames:
        return _broken(SourceLocation("", 0), said)
    return _broken(SourceLocation.of_summary(frames[-1]), said, frames[-1].name)


def _broken(place: SourceLocation, reason: str, function: str = "") -> Finding:
    code = linecache.getline(*place).strip() if place.file else ""
    witnesses: tuple[Witness] = ("dynamo",)
    return Finding(
        "graph-break", *place, code, function=function, witnesses=witnesses, reason=reason
    )
