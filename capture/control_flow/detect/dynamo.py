"""What Dynamo reports of a model's control flow: where its graph breaks."""

import copy
import linecache
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.findings import Finding, merge
from enginecast.capture.python.locations import SourceLocation, is_model_code
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.refusals.explain import explain
from enginecast.library_names import private


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
    place = SourceLocation(refusal.file, refusal.line)
    return _broken(place, f"{what}: {refusal.detail or refusal.reason}")


def _of_break(reason: Any) -> Finding:
    frames = [frame for frame in reason.user_stack or () if is_model_code(frame.filename)]
    said = next((line.strip() for line in str(reason.reason).splitlines() if line.strip()), "")
    if not frames:
        return _broken(SourceLocation("", 0), said)
    return _broken(SourceLocation.of_summary(frames[-1]), said, frames[-1].name)


def _broken(place: SourceLocation, reason: str, function: str = "") -> Finding:
    code = linecache.getline(*place).strip() if place.file else ""
    return Finding(
        "graph-break", *place, code, function=function, witnesses=("dynamo",), reason=reason
    )
