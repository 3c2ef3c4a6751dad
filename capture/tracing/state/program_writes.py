"""Detect state that a program keeps between calls: an engine would silently drop the writes.

A program shows what writes to a parameter or buffer.  What Python keeps is looked for in
`capture.tracing.state.repeated_calls`.
"""

from collections.abc import Container, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.capture.python.locations import SourceLocation, is_model_code
from enginecast.errors import CaptureError
from enginecast.passes.captured.canonicalize_writes import owners, written
from enginecast.passes.ir.base import Site
from enginecast.passes.ir.blocks import all_blocks


def computed_instead(
    program: ExportedProgram, sites: Iterable[Site], state: Container[str] = ()
) -> tuple[str, ...]:
    """Notes on the buffers that every call overwrites whole before it reads them.

    Args:
        sites: of `canonicalize-writes`.
        state: names of buffers that come as inputs: torch writes what is assigned to them into the
            module's own, which nothing reads.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    return tuple(
        f"the model overwrites its buffer {site.note}{line_of(nodes[site.node])} before it reads"
        " it: the engine computes it in every call"
        for site in sites
        if site.note and site.note not in state
    )


def writes_of_weights(program: ExportedProgram) -> dict[Node, str]:
    """The writes into parameters and buffers, with the name of each, where all that is written is
    computed from weights alone; none where one is not.

    Such a model sets itself up when it is first called.
    """
    found = dict(written(program.graph, owners(program, _state(program))))
    inputs = set(program.graph_signature.user_inputs)
    varying: set[Node] = set()
    for node in program.graph.nodes:
        is_input = node.op == "placeholder" and node.name in inputs
        if is_input or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
    is_set_up = all(node.graph is program.graph and node not in varying for node in found)
    return found if is_set_up else {}


def settles(module: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Whether a module changes its weights in its first call alone.

    Args:
        module: with weights, not called yet.
        inputs: for the calls.
    """

    def after_a_call() -> dict[str, Tensor]:
        module(**{name: tensor.clone() for name, tensor in inputs.items()})
        tensors = chain(module.named_parameters(), module.named_buffers())
        return {name: tensor.clone() for name, tensor in tensors}

    with torch.no_grad():
        first, second = after_a_call(), after_a_call()
    return all(torch.equal(tensor, first[name]) for name, tensor in second.items())


def _state(program: ExportedProgram) -> dict[str, str]:
    signature = program.graph_signature
    return {**signature.inputs_to_parameters, **signature.inputs_to_buffers}


def refuse_mutation(program: ExportedProgram, allowed: Container[Node] = ()) -> None:
    """Raise CaptureError when `program` writes to a parameter or buffer, also through a view, or
    when a branch or the body of a loop writes into anything that it was given.

    Args:
        allowed: writes that leave nothing to a later call.
    """
    for node, owner in written(program.graph, owners(program, _state(program))):
        if node in allowed:
            continue
        raise CaptureError(
            f"the model writes to its own state: {node.target} changes {owner}{line_of(node)}",
            hint="An engine keeps no state between calls: make its buffers inputs and outputs"
            " (--stateful), or return the new value instead.",
        )
    for outer, block in all_blocks(program):
        given = {placeholder: placeholder.name for placeholder in block.placeholders}
        for node, name in written(block.module.graph, given):
            raise CaptureError(
                f"{node.target}{line_of(node)} writes into {name}, which the {block.path} graph of"
                f" {outer.target} is given",
                hint="Write into a copy of it: x = x.clone().",
            )


def input_writes(program: ExportedProgram) -> tuple[str, ...]:
    """Notes on inputs that `program` writes into, as sentences: an engine has copies of its own."""
    inputs = {str(name): str(name) for name in program.graph_signature.user_inputs}
    writes = list(written(program.graph, owners(program, inputs)))
    found = {owner: node for node, owner in reversed(writes)}
    return tuple(
        f"the model writes into its input {name!r}{line_of(node)}; the engine leaves what the "
        "caller gave as it is"
        for name, node in found.items()
    )


def line_of(node: Node) -> str:
    """` at file:line` of the user's code; empty where torch recorded none."""
    frames = SourceLocation.in_text(node.meta.get("stack_trace") or "")
    places = [place for place in frames if is_model_code(place.file)]
    return f" at {places[-1]}" if places else ""
