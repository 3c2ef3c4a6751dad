"""Shows a report: tables on a terminal, `report.json`, and one static `report.html`."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined
from rich.console import Console
from rich.table import Table

from enginecast.runtime.bundle.manifest import Fusion, OutputVerdict, Verdict
from enginecast.verify.emulate.data import Emulation, StoredValues, WeightLoss, tightest
from enginecast.verify.metrics import BEYOND, times
from enginecast.verify.report.data import PassCheck, Report
from enginecast.verify.verdict import verdict_line

JSON_NAME = "report.json"
HTML_NAME = "report.html"
SHOWN = 3
"""Modules in the table on a terminal; the report has all."""


def write_report(folder: Path, report: Report) -> tuple[Path, Path]:
    """Write `report.json` and `report.html` into a folder; return their paths."""
    as_json, as_html = folder / JSON_NAME, folder / HTML_NAME
    as_json.write_text(to_json(report), encoding="utf-8")
    as_html.write_text(_page(report), encoding="utf-8")
    return as_json, as_html


def to_json(report: Report) -> str:
    """All of a report; the same text for the same report."""
    content = msgspec.to_builtins(report)
    return json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n"


@dataclass(frozen=True)
class _Column:
    """What a table shows of each of its rows; the first column names them."""

    title: str
    cell: Callable[[Any], str]
    page_only: bool = False
    """Where there is room."""
    is_bad: Callable[[Any], bool] = lambda row: False
    """Whether the page marks the cell."""


@dataclass(frozen=True)
class _Table:
    """A table for the terminal and for the page."""

    rows: Sequence[Any]
    columns: Sequence[_Column]


def print_report(report: Report, console: Console) -> None:
    """Print the verdict and, where there are any, the tables of passes and fusions."""
    print_verdict(report.verdict, report.floor_dtype, console)
    for target, verdict in report.others.items():
        _print_line(f"{target}: {verdict_line(verdict, report.floor_dtype)}", console)
    if report.passes:
        _print_table(_passes(report.passes), console)
    if report.fusions:
        _print_table(_fusions(report.fusions), console)
    if report.emulation is not None:
        print_emulation(report.emulation, console)
    for line in (*report.layers, *report.notes):
        _print_line(line, console)


def print_verdict(verdict: Verdict, dtype: str, console: Console) -> None:
    """Print how every output was judged, then the verdict and its reasons."""
    _print_table(_outputs(verdict.outputs, dtype), console)
    is_rejected = verdict.outcome == "rejected"
    _print_line(verdict_line(verdict, dtype), console, "bold red" if is_rejected else "bold green")
    for reason in verdict.reasons[1:] if is_rejected else verdict.reasons:
        _print_line(f"  {reason}", console)


def print_emulation(emulation: Emulation, console: Console) -> None:
    """Print the modules with the least headroom, and where values overflow first."""
    heading = f"as {emulation.profile} computes: {emulation.summary}"
    console.print(heading, markup=False, highlight=False, soft_wrap=True)
    _print_table(_modules(tightest(emulation, SHOWN), "least headroom"), console)


def _print_line(line: str, console: Console, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False)


def _print_table(table: _Table, console: Console) -> None:
    shown = [column for column in table.columns if not column.page_only]
    made = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(shown):
        made.add_column(column.title, justify="left", no_wrap=index == 0, overflow="fold")
    for row in table.rows:
        made.add_row(*(column.cell(row) for column in shown))
    console.print(made)


def _of(name: str, form: str = "{}") -> Callable[[Any], str]:
    """A cell with an attribute of its row; a dash for None."""

    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else form.format(value)

    return cell


def _outputs(outputs: Sequence[OutputVerdict], dtype: str) -> _Table:
    columns = (
        _Column("output", _of("name")),
        _Column(
            f"error / eager {dtype}'s",
            lambda row: "no finite values" if row.ratio is None else times(row.ratio),
            is_bad=lambda row: row.ratio is None or row.ratio > row.limit,
        ),
        _Column("limit", lambda row: "-" if row.limit is None else times(row.limit)),
        _Column("relative L2", _of("error", "{:.2e}")),
        _Column("floor", _of("floor", "{:.2e}"), page_only=True),
        _Column("cosine", _of("cosine", "{:.7f}")),
        _Column("prompt cosine", _of("prompt_cosine", "{:.7f}")),
        _Column("SQNR dB", _of("sqnr_db", "{:.1f}")),
        _Column("largest difference", _of("max_abs", "{:.2e}"), page_only=True),
        _Column("pad rows", _of("pad_error", "{:.2e}")),
    )
    return _Table(outputs, columns)


def _passes(passes: Sequence[PassCheck]) -> _Table:
    columns = (
        _Column("pass", _of("name")),
        _Column("promise", _of("promise"), page_only=True),
        _Column("done", _of("rewritten")),
        _Column("left", _of("left_alone")),
        _Column("seconds", _of("seconds", "{:.2f}"), page_only=True),
        _Column("error", _error, is_bad=lambda row: bool(row.failure)),
        _Column("worst place", lambda row: f"{row.worst_place} {row.worst_source}".strip()),
        _Column("found", _found, page_only=True),
    )
    return _Table(passes, columns)


def _error(check: PassCheck) -> str:
    """The worst error of a pass as people read it."""
    if check.worst_error >= BEYOND:
        text = "not finite"
    else:
        text = "equal" if check.worst_error == 0 else f"{check.worst_error:.2e}"
    return f"{text} BROKEN" if check.failure else text


def _found(check: PassCheck) -> str:
    moved = f"other values now leave {', '.join(check.moved)}" if check.moved else ""
    return "\n".join(filter(None, (check.failure, moved)))


def _fusions(fusions: Sequence[Fusion]) -> _Table:
    names = ("kind", "expected", "program", "engine", "runtime")
    columns = [_Column("fusion" if name == "kind" else name, _of(name)) for name in names]
    missing = _Column("missing", lambda row: "\n".join(row.missing))
    return _Table(fusions, (*columns, missing))


def _modules(modules: Sequence[StoredValues], title: str) -> _Table:
    columns = (
        _Column(title, lambda row: f"{row.module or 'the model itself'} {row.source}".strip()),
        _Column("largest", _of("max_abs", "{:.4g}")),
        _Column("bits", _of("headroom_bits", "{:.1f}"), is_bad=lambda row: row.overflow > 0),
        _Column("overflow", _of("overflow"), is_bad=lambda row: row.overflow > 0),
        _Column("clamped", _of("clamped"), is_bad=lambda row: row.clamped > 0),
        _Column("subnormal", _of("subnormal", "{:.2%}"), page_only=True),
        _Column("energy lost", _of("energy_lost", "{:.2e}"), page_only=True),
        _Column("SQNR dB", _of("sqnr_db", "{:.1f}")),
        _Column("op", _of("op"), page_only=True),
    )
    return _Table(modules, columns)


def _weights(weights: Sequence[WeightLoss]) -> _Table:
    columns = (
        _Column("weight", _of("name")),
        _Column("largest", _of("max_abs", "{:.4g}")),
        _Column("overflow", _of("overflow"), is_bad=lambda row: row.overflow > 0),
        _Column("subnormal", _of("subnormal", "{:.2%}")),
        _Column("energy lost", _of("energy_lost", "{:.2e}")),
    )
    return _Table(weights, columns)


Section = tuple[str, str, Sequence[str], _Table | None]
"""Heading, a note below it, items of a list, a table; without items and rows it is not shown."""


def _sections(report: Report) -> Iterator[Section]:
    yield "Outputs", "", (), _outputs(report.verdict.outputs, report.floor_dtype)
    others = report.others.items()
    engines = ["\n".join((f"{name}: {it.outcome}", *it.reasons)) for name, it in others]
    yield "Further engines", "", engines, None
    yield "Layers of the engine", "", report.layers, None
    yield "Passes", "", (), _passes(report.passes)
    yield "Fusions", "", (), _fusions(report.fusions)
    if (found := report.emulation) is not None:
        heading = f"In {report.precision} as {found.profile} computes"
        yield heading, f"{found.about}.\n{found.summary}", (), _modules(found.modules, "module")
        yield "Weights that lose values", "", (), _weights(found.weights)


_SMALLEST, _LARGEST = -8.0, 0.0
"""Powers of ten between which the strip goes from pale to dark."""


def _page(report: Report) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["shade"] = shade
    # Passes that changed a value somewhere, with the error of every module after them.
    strips = [(one.name, one.modules) for one in report.passes if any(one.modules.values())]
    verdict = verdict_line(report.verdict, report.floor_dtype)
    page = environment.from_string(_PAGE)
    return (
        page.render(report=report, verdict=verdict, sections=_sections(report), strips=strips)
        + "\n"
    )


def shade(error: float) -> str:
    """The color of an error in a strip: pale at 1e-8 and below, dark at 1 and above."""
    power = math.log10(error) if error > 0 else _SMALLEST
    share = min(1.0, max(0.0, (power - _SMALLEST) / (_LARGEST - _SMALLEST)))
    return f"hsl({170 - 170 * share:.0f} 60% {92 - 50 * share:.0f}%)"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ report.model }}: {{ report.verdict.outcome }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid #ddd; }
td, li { font-variant-numeric: tabular-nums; white-space: pre-line; }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
.verdict { padding: .5rem .75rem; border-left: 4px solid #2a8; background: #f3faf7; }
.rejected { border-color: #c33; background: #fdf4f4; }
.strip { display: flex; height: 1.6rem; margin: .25rem 0 .75rem; }
.strip span { flex: 1 1 0; min-width: 2px; }
.bad { color: #b00; font-weight: 600; } .quiet { color: #666; }
</style>
</head>
<body>
<h1>{{ report.model }} → {{ report.target }}, {{ report.precision }}</h1>
<p class="verdict{{ ' rejected' if report.verdict.outcome == 'rejected' }}">{{ verdict }}</p>
{% if report.verdict.reasons %}
<ul>
{% for reason in report.verdict.reasons %}
<li>{{ reason }}</li>
{% endfor %}
</ul>
{% endif %}
<p class="quiet">Pipeline <code>{{ report.pipeline or "none" }}</code>. Judged on
{{ report.verdict.where.provider or "no engine" }}, {{ report.verdict.where.device }}
({% for name, version in report.verdict.where.versions | dictsort -%}
{{ name }} {{ version }}{{ ", " if not loop.last }}
{%- endfor %}).
Cases: {{ report.verdict.cases | join(", ") }}.
{% if report.left_out %}Verified but not stored: {{ report.left_out | join(", ") }}.{% endif %}
{% if report.speed %}Speed: {{ report.speed }}.{% endif %}</p>
{% for heading, note, lines, table in sections if lines or (table and table.rows) %}
<h2>{{ heading }}</h2>
{% if note %}<p class="quiet">{{ note }}</p>{% endif %}
{% if lines %}<ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
{% if table %}
<table>
<tr>{% for column in table.columns %}<th>{{ column.title }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr><td><code>{{ table.columns[0].cell(row) }}</code></td>
{% for column in table.columns[1:] %}
<td{% if column.is_bad(row) %} class="bad"{% endif %}>{{ column.cell(row) }}</td>
{% endfor %}
</tr>
{% endfor %}
</table>
{% endif %}
{% endfor %}
{% if strips %}
<h2>Error by module</h2>
<p class="quiet">Relative L2 error after the pass, in order of execution: pale at 1e-8, dark at 1.
Point at a cell for its module.</p>
{% for name, modules in strips %}
<div><code>{{ name }}</code></div>
<div class="strip">
{% for module, error in modules.items() %}
<span style="background: {{ error | shade }}" title="{{ module }}: {{ '%.2e' % error }}"></span>
{% endfor %}
</div>
{% endfor %}
{% endif %}
{% if report.seconds %}
<h2>Time</h2>
<p>{% for step, seconds in report.seconds.items() -%}
{{ step }} {{ '%.1f' % seconds }} s
{%- if report.memory.get(step) %} ({{ '%.0f' % (report.memory[step] / 1e6) }} MB){% endif -%}
{{ ", " if not loop.last }}
{%- endfor %}</p>
{% endif %}
{% for note in report.notes %}
<p class="quiet">{{ note }}</p>
{% endfor %}
</body>
</html>"""
