"""Make the graphs within a captured program ready for passes and exporters."""

from dataclasses import replace

from enginecast.capture.export import Captured
from enginecast.errors import CaptureError
from enginecast.passes.captured_blocks import name_places, unknown_structure
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.lift_constants import lift_constants
from enginecast.passes.source import source_line
from enginecast.passes.structure import has_structure


def lifted(captured: Captured) -> Captured:
    """Constants within blocks become constants of the program, which passes and exporters know.

    Raises:
        CaptureError: an op runs a graph and is none of cond, while_loop and scan.
    """
    unknown = unknown_structure(captured.program)
    if unknown is not None:
        place = source_line(unknown) or unknown.name
        raise CaptureError(
            f"{unknown.target} at {place} runs a graph in a way that engines do not have",
            hint="Of torch's structured operators take cond, while_loop and scan.",
        )
    if not has_structure(captured.program):
        return captured
    program = structural_copy(captured.program)
    lift_constants(program)
    name_places(program)
    program.graph_module.recompile()
    return replace(captured, program=program)
