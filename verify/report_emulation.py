"""Shows what an emulated run found: a few lines and a short table on a terminal."""

from rich.console import Console
from rich.table import Table

from enginecast.verify.emulation_data import Emulation, overflow_sentence, tightest

SHOWN = 3
"""Modules in the table on a terminal; the report has all."""


def print_emulation(emulation: Emulation, console: Console) -> None:
    """Print the modules with the least headroom, and where values overflow first."""
    heading = f"as {emulation.profile} computes: {told(emulation)}"
    console.print(heading, markup=False, highlight=False, soft_wrap=True)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("least headroom", "largest", "bits", "overflow", "clamped", "SQNR dB"):
        shown.add_column(column, justify="left", overflow="fold")
    for place in tightest(emulation, SHOWN):
        shown.add_row(
            f"{place.module or 'the model itself'} {place.source}".strip(),
            f"{place.max_abs:.4g}",
            "-" if place.headroom_bits is None else f"{place.headroom_bits:.1f}",
            str(place.overflow),
            str(place.clamped),
            "-" if place.sqnr_db is None else f"{place.sqnr_db:.1f}",
        )
    console.print(shown)


def told(emulation: Emulation) -> str:
    """What was found, in one or two sentences."""
    found = emulation.overflow
    clamped = [place for place in emulation.ops if place.clamped]
    if found is not None:
        text = f"{overflow_sentence(found)}, case {found.case!r}"
    elif clamped:
        text = f"no overflow, but values are cut off at {clamped[0].module or 'the model itself'}"
    else:
        text = "no value overflows"
    weights = [loss.name for loss in emulation.weights]
    if not weights:
        return text
    more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    return f"{text}; cast to the dtype, {weights[0]}{more} lose values"
