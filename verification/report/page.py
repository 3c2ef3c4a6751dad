"""The HTML pages of a report and of a comparison: one static file each, from the templates here."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from enginecast.installation import required
from enginecast.verification.metrics import times
from enginecast.verification.report.comparison import Comparison
from enginecast.verification.report.data import Drawing, PassCheck, Profile, Report
from enginecast.verification.report.drawing import in_layers
from enginecast.verification.report.plan_picture import plan_picture
from enginecast.verification.report.precision_map import precision_map
from enginecast.verification.report.strip import block_of, color_of, strip_of
from enginecast.verification.report.tables import (
    downgrade_line,
    fusions_table,
    modules_table,
    outputs_table,
    passes_table,
    plan_table,
    signature_table,
    size,
    speed_table,
    stored_table,
    weights_table,
)
from enginecast.verification.verdict import verdict_line

if TYPE_CHECKING:
    import jinja2

MOST_ROWS = 600
"""Most rows of a table; the rest is in report.json."""
SHOWN_BLOCKS = 40
"""Most blocks of the map of precisions that are not folded."""
VIEWED = (".onnx", ".xml", ".pt")
"""Files that Netron draws."""
SMALL = 14
"""Most nodes of a drawing that fits a screen."""


def page_of(report: Report) -> str:
    """The whole page of a report.

    Raises:
        MissingError: jinja2 is not installed.
    """
    return _rendered("page.html.template", report=report)


def comparison_page_of(comparison: Comparison) -> str:
    """The whole page of a comparison.

    Raises:
        MissingError: jinja2 is not installed.
    """
    return _rendered("comparison.html.template", comparison=comparison)


def _rendered(template: str, **content: object) -> str:
    return _environment().get_template(template).render(**content) + "\n"


@functools.cache
def _environment() -> "jinja2.Environment":
    """Compiles each template once."""
    with required("jinja2", "the page of a report", "export"):
        import jinja2
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        {"bytes": size, "digits": _digits, "downgrade_line": downgrade_line, "times": times}
    )
    functions: tuple[Callable[..., Any], ...] = (
        *(color_of, in_layers, most_telling, plan_picture, precision_map, prompt_rows, spent_by),
        *(strip_of, verdict_line),
        *(fusions_table, modules_table, outputs_table, passes_table, plan_table, weights_table),
        *(signature_table, speed_table, stored_table),
    )
    environment.globals.update(
        {each.__name__: each for each in functions},
        MOST_ROWS=MOST_ROWS,
        SHOWN_BLOCKS=SHOWN_BLOCKS,
        VIEWED=VIEWED,
    )
    return environment


def _digits(value: float) -> str:
    """A number of a drawing, without digits that no screen has."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def most_telling(report: Report) -> tuple[PassCheck, Drawing, list[tuple[int, str]]] | None:
    """The pass that fused the most ops in one module, with a drawing of it: those that fit a screen
    come first.  And the index and name of all other passes with drawings.
    """
    drawn = {
        index: check.details.drawings
        for index, check in enumerate(report.passes)
        if check.details is not None and check.details.drawings
    }
    whole = [index for index, (first, *_) in drawn.items() if first.before and first.after]

    def gain(index: int) -> tuple[bool, int]:
        before, after = len(drawn[index][0].before), len(drawn[index][0].after)
        return max(before, after) <= SMALL, before - after

    if not whole:
        return None
    most = max(whole, key=gain)
    others = [(index, report.passes[index].name) for index in drawn if index != most]
    return report.passes[most], drawn[most][0], others


def prompt_rows(report: Report) -> list[SimpleNamespace]:
    """Each prompt with its error and cosine; of several outputs, those of the worst."""
    outputs = [output for output in report.verdict.outputs if output.prompt_errors]
    rows = []
    for index, text in enumerate(report.prompts):
        found = [output for output in outputs if index < len(output.prompt_errors)]
        if not found:
            break
        errors = {output.name: output.prompt_errors[index] for output in found}
        worst = max(found, key=lambda each: math.inf if (e := errors[each.name]) is None else e)
        cosine = worst.prompt_cosines[index]
        rows.append(
            SimpleNamespace(text=text, error=errors[worst.name], cosine=cosine, output=worst.name)
        )
    return rows


def spent_by(profile: Profile) -> SimpleNamespace:
    """The microseconds of a profile in all, by block, by op, and by module and op."""
    blocks: dict[str, float] = {}
    ops: dict[str, tuple[int, float]] = {}
    for layer in profile.layers:
        block = block_of(layer.module) or "no module"
        blocks[block] = blocks.get(block, 0.0) + layer.microseconds
        count, spent = ops.get(layer.op, (0, 0.0))
        ops[layer.op] = count + layer.nodes, spent + layer.microseconds
    by_op = sorted(ops.items(), key=lambda each: -each[1][1])
    longest = sorted(profile.layers, key=lambda layer: -layer.microseconds)
    return SimpleNamespace(
        total=sum(layer.microseconds for layer in profile.layers) or 1.0,
        blocks=[{"name": name, "spent": spent, "note": ""} for name, spent in blocks.items()],
        ops=[{"name": op, "spent": t, "note": f"{count}x"} for op, (count, t) in by_op],
        layers=[
            {"name": x.module or "no module", "spent": x.microseconds, "note": x.op}
            for x in longest
        ],
    )
