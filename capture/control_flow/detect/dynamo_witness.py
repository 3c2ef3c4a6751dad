"""What Dynamo says of a model: whether it is one graph, and at which lines it breaks.

`torch._dynamo.explain` counts graphs, but 0 graphs and -1 breaks are what it counts when it gives
up on a function with a loop or `try`: a model that is anything but one graph.
"""

import copy
import linecache
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.findings import Finding, merge
from enginecast.capture.python.locations import is_model_code
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.refusals.refusal import explain


def ask_dynamo(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Finding, ...]:
    """Run a copy of `module` under Dynamo; never raises, and leaves no compiled code behind.

    Args:
        module: with real weights; the copy shares its parameters, and has its own buffers.
        inputs: example inputs by argument name; they are copied.

    Returns:
        The lines at which it breaks, one without a line where it names none; nothing for one graph.
    """
    try:
        with _alone():
            found = torch._dynamo.explain(private_copy(module))(**_clones(inputs))
    except Exception as error:  # Dynamo raises many kinds, and the model any
        return (_of_error(error, "explain failed"),)
    breaks = [_of_break(reason) for reason in found.break_reasons]
    if found.graph_count == 1 and not breaks:
        return ()
    if found.graph_count > 1 and any(each.file for each in breaks):
        return tuple(merge(breaks))
    refused = _refusal_of_one_graph(module, inputs)
    # Of a function that it gave up on, the reasons are those of the functions within.
    return () if refused is None else tuple(merge([refused, *breaks]))


@contextmanager
def _alone() -> Iterator[None]:
    """Dynamo without what it compiled before, with symbols for numbers read out of tensors."""
    config: Any = torch._dynamo.config
    torch._dynamo.reset()
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
        torch._dynamo.reset()


def private_copy(module: nn.Module) -> nn.Module:
    """A copy to run, which may write to buffers and attributes; it shares the large parameters."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    return copy.deepcopy(module, shared)


def _clones(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _refusal_of_one_graph(module: nn.Module, inputs: Mapping[str, Tensor]) -> Finding | None:
    """Ask for one graph, which has no other answer than yes or an error."""
    try:
        with _alone():
            torch.compile(private_copy(module), backend="eager", fullgraph=True)(**_clones(inputs))
    except Exception as error:
        return _of_error(error, "not one graph")
    return None


def _of_error(error: Exception, what: str) -> Finding:
    refusal = explain(error)
    return _finding(refusal.file, refusal.line, "", f"{what}: {refusal.detail}")


def _of_break(reason: Any) -> Finding:
    stack: Sequence[Any] = reason.user_stack or ()
    frames = [frame for frame in stack if is_model_code(frame.filename)]
    said = next((line.strip() for line in str(reason.reason).splitlines() if line.strip()), "")
    if not frames:
        return _finding("", 0, "", said)
    return _finding(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name, said)


def _finding(file: str, line: int, function: str, reason: str) -> Finding:
    return Finding(
        "graph-break",
        file,
        line,
        linecache.getline(file, line).strip() if file else "",
        function=function,
        witnesses=("dynamo",),
        reason=reason,
    )
