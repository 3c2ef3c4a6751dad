"""What low precision would do to a model: the program of a plan, emulated before it is built."""

from rich.console import Console
from torch.export import ExportedProgram

from enginecast.plan import Plan
from enginecast.prepare import Prepared
from enginecast.rewrite import observed_cases
from enginecast.verify.emulate import emulate
from enginecast.verify.emulate_profiles import profile_for
from enginecast.verify.emulation_data import Emulation
from enginecast.verify.program import mask_of
from enginecast.verify.report_emulation import print_emulation


def forecast(prepared: Prepared, plan: Plan, program: ExportedProgram) -> Emulation | None:
    """Emulate a program over the first cases of its verification.

    Args:
        program: after the plan's passes.

    Returns:
        None for fp32, which stores what it computes.
    """
    if plan.precision == "fp32":
        return None
    cases = observed_cases(prepared)
    _, found = emulate(
        program,
        {case.name: case.inputs for case in cases},
        profile_for(plan.target),
        masks=[mask_of(case, prepared.mask_input) for case in cases],
    )
    return found


def print_forecast(found: Emulation | None, console: Console) -> None:
    """Show it under a plan."""
    if found is not None:
        console.print()
        print_emulation(found, console)
