"""The page of a report: one static file of HTML."""

import math
from collections.abc import Iterator, Sequence

from jinja2 import Environment, StrictUndefined

from enginecast.verify.report.data import Report
from enginecast.verify.report.tables import (
    ReportTable,
    fusions_table,
    modules_table,
    outputs_table,
    passes_table,
    weights_table,
)
from enginecast.verify.verdict import verdict_line

Section = tuple[str, str, Sequence[str], ReportTable | None]
"""Heading, a note below it, items of a list, a table; without items and rows it is not shown."""


def _sections(report: Report) -> Iterator[Section]:
    yield "Outputs", "", (), outputs_table(report.verdict.outputs, report.floor_dtype)
    others = report.others.items()
    engines = ["\n".join((f"{name}: {it.outcome}", *it.reasons)) for name, it in others]
    yield "Further engines", "", engines, None
    yield "Layers of the engine", "", report.layers, None
    yield "Passes", "", (), passes_table(report.passes)
    yield "Fusions", "", (), fusions_table(report.fusions)
    if (found := report.emulation) is not None:
        heading = f"In {report.precision} as {found.profile} computes"
        yield (
            heading,
            f"{found.about}.\n{found.summary}",
            (),
            modules_table(found.modules, "module"),
        )
        yield "Weights that lose values", "", (), weights_table(found.weights)


_SMALLEST, _LARGEST = -8.0, 0.0
"""Powers of ten between which the strip goes from pale to dark."""


def page_of(report: Report) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["shade"] = shade
    # Passes that changed a value somewhere, with the error of every module after them.
    strips = [(one.name, one.modules) for one in report.passes if any(one.modules.values())]
    verdict = verdict_line(report.verdict, report.floor_dtype)
    template = environment.from_string(_PAGE)
    return (
        template.render(report=report, verdict=verdict, sections=_sections(report), strips=strips)
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
