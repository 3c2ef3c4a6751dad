"""Shows a report: tables on a terminal, `report.json`, and one static `report.html`."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from jinja2 import Environment, StrictUndefined
from rich.console import Console
from rich.table import Table

from enginecast.runtime.bundle.manifest import Fusion, OutputVerdict, Verdict
from enginecast.verify.emulate.data import Emulation, tightest
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
    as_html.write_text(
        render_page(report, verdict_line(report.verdict, report.floor_dtype)), encoding="utf-8"
    )
    return as_json, as_html


def to_json(report: Report) -> str:
    """All of a report; the same text for the same report."""
    content = msgspec.to_builtins(report)
    return json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n"


def print_report(report: Report, console: Console) -> None:
    """Print the verdict and, where there are any, the tables of passes and fusions."""
    print_verdict(report.verdict, report.floor_dtype, console)
    for target, verdict in report.others.items():
        console.print(
            f"{target}: {verdict_line(verdict, report.floor_dtype)}", markup=False, highlight=False
        )
    if report.passes:
        console.print(_passes_table(report.passes))
    if report.fusions:
        console.print(_fusions_table(report.fusions))
    if report.emulation is not None:
        print_emulation(report.emulation, console)
    for line in (*report.layers, *report.notes):
        console.print(line, markup=False, highlight=False)


def print_verdict(verdict: Verdict, dtype: str, console: Console) -> None:
    """Print how every output was judged, then the verdict and its reasons.

    Args:
        dtype: of the noise floor.
    """
    console.print(_outputs_table(verdict.outputs, dtype))
    style = "bold red" if verdict.outcome == "rejected" else "bold green"
    console.print(verdict_line(verdict, dtype), style=style, markup=False, highlight=False)
    shown = verdict.reasons[1:] if verdict.outcome == "rejected" else verdict.reasons
    for reason in shown:
        console.print(f"  {reason}", markup=False, highlight=False)


def print_emulation(emulation: Emulation, console: Console) -> None:
    """Print the modules with the least headroom, and where values overflow first."""
    heading = f"as {emulation.profile} computes: {emulation.summary}"
    console.print(heading, markup=False, highlight=False, soft_wrap=True)
    shown = _table("least headroom", "largest", "bits", "overflow", "clamped", "SQNR dB")
    for place in tightest(emulation, SHOWN):
        shown.add_row(
            f"{place.module or 'the model itself'} {place.source}".strip(),
            f"{place.max_abs:.4g}",
            _or_dash(place.headroom_bits, "{:.1f}".format),
            str(place.overflow),
            str(place.clamped),
            _or_dash(place.sqnr_db, "{:.1f}".format),
        )
    console.print(shown)


def _outputs_table(outputs: Iterable[OutputVerdict], dtype: str) -> Table:
    table = _table(
        "output",
        f"error / eager {dtype}'s",
        "limit",
        "relative L2",
        "cosine",
        "prompt cosine",
        "SQNR dB",
        "pad rows",
    )
    for output in outputs:
        table.add_row(
            output.name,
            times(output.ratio) if output.ratio is not None else "no finite values",
            _or_dash(output.limit, times),
            _or_dash(output.error, "{:.2e}".format),
            _or_dash(output.cosine, "{:.7f}".format),
            _or_dash(output.prompt_cosine, "{:.7f}".format),
            _or_dash(output.sqnr_db, "{:.1f}".format),
            _or_dash(output.pad_error, "{:.2e}".format),
        )
    return table


def _passes_table(passes: Iterable[PassCheck]) -> Table:
    table = _table("pass", "done", "left", "error", "worst place")
    for check in passes:
        place = f"{check.worst_place} {check.worst_source}".strip()
        table.add_row(
            check.name,
            str(check.rewritten),
            str(check.left_alone),
            _error(check),
            place,
        )
    return table


def _error(check: PassCheck) -> str:
    """The worst error of a pass as people read it."""
    if check.worst_error >= BEYOND:
        text = "not finite"
    else:
        text = "equal" if check.worst_error == 0 else f"{check.worst_error:.2e}"
    return f"{text} BROKEN" if check.failure else text


def _fusions_table(fusions: Iterable[Fusion]) -> Table:
    table = _table("fusion", "expected", "program", "engine", "runtime", "missing")
    for fusion in fusions:
        table.add_row(
            fusion.kind,
            str(fusion.expected),
            str(fusion.program),
            str(fusion.engine),
            "-" if fusion.runtime is None else str(fusion.runtime),
            "\n".join(fusion.missing),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left", no_wrap=index == 0, overflow="fold")
    return table


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


_SMALLEST, _LARGEST = -8.0, 0.0
"""Powers of ten between which the strip goes from pale to dark."""


def render_page(report: Report, verdict: str) -> str:
    """Render a report as one HTML page.

    Args:
        verdict: the verdict in one sentence.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(
        times=lambda v: "-" if v is None else times(v),
        tiny=lambda v: "-" if v is None else f"{v:.2e}",
        fixed=lambda v, digits: "-" if v is None else f"{v:.{digits}f}",
        brief="{:.4g}".format,
        shade=shade,
    )
    page = environment.from_string(_PAGE)
    # Passes that changed a value somewhere, with the error of every module after them.
    strips = [(one.name, one.modules) for one in report.passes if any(one.modules.values())]
    return page.render(report=report, verdict=verdict, strips=strips) + "\n"


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
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
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
{% if report.left_out %}Verified but not stored: {{ report.left_out | join(", ") }}.{% endif %}</p>
<h2>Outputs</h2>
<table>
<tr><th>output</th><th>error / eager {{ report.floor_dtype }}'s</th><th>limit</th>
<th>relative L2</th>
<th>floor</th><th>least cosine</th><th>SQNR dB</th><th>largest difference</th><th>pad rows</th></tr>
{% for o in report.verdict.outputs %}
<tr><td><code>{{ o.name }}</code></td>
<td class="n{{ ' bad' if o.ratio is none or o.ratio > o.limit }}">{{ o.ratio | times }}</td>
<td class="n">{{ o.limit | times }}</td><td class="n">{{ o.error | tiny }}</td>
<td class="n">{{ o.floor | tiny }}</td><td class="n">{{ o.cosine | fixed(7) }}</td>
<td class="n">{{ o.sqnr_db | fixed(1) }}</td><td class="n">{{ o.max_abs | tiny }}</td>
<td class="n">{{ o.pad_error | tiny }}</td></tr>
{% endfor %}
</table>
{% if report.others %}
<h2>Further engines</h2>
<ul>
{% for target, found in report.others.items() %}
<li>{{ target }}: {{ found.outcome }}
{% for reason in found.reasons %}
<br>{{ reason }}
{% endfor %}
</li>
{% endfor %}
</ul>
{% endif %}
{% if report.layers %}
<h2>Layers of the engine</h2>
<ul>
{% for line in report.layers %}
<li>{{ line }}</li>
{% endfor %}
</ul>
{% endif %}
{% if report.passes %}
<h2>Passes</h2>
<table>
<tr><th>pass</th><th>promise</th><th>rewritten</th><th>left alone</th><th>time</th>
<th>worst place</th><th>its error</th></tr>
{% for p in report.passes %}
<tr><td><code>{{ p.name }}</code></td><td>{{ p.promise }}</td><td class="n">{{ p.rewritten }}</td>
<td class="n">{{ p.left_alone }}</td><td class="n">{{ p.seconds | fixed(2) }} s</td>
<td><code>{{ p.worst_place }}</code> {{ p.worst_source }}
{% if p.failure %}<br><span class="bad">{{ p.failure }}</span>{% endif %}
{% if p.moved %}<br><span class="quiet">other values now leave {{ p.moved | join(", ") }}</span>
{% endif %}</td>
<td class="n">{{ "equal" if p.worst_error == 0 else p.worst_error | tiny }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% if report.fusions %}
<h2>Fusions</h2>
<table>
<tr><th>fusion</th><th>expected</th><th>program</th><th>engine</th><th>runtime</th>
<th>missing</th></tr>
{% for f in report.fusions %}
<tr><td>{{ f.kind }}</td><td class="n">{{ f.expected }}</td><td class="n">{{ f.program }}</td>
<td class="n">{{ f.engine }}</td><td class="n">{{ "-" if f.runtime is none else f.runtime }}</td>
<td>{% for m in f.missing %}<code>{{ m }}</code><br>{% endfor %}</td></tr>
{% endfor %}
</table>
{% endif %}
{% if report.emulation %}
<h2>In {{ report.precision }} as {{ report.emulation.profile }} computes</h2>
<p class="quiet">{{ report.emulation.about }}.
{{ report.emulation.summary }}</p>
<table>
<tr><th>module</th><th>largest</th><th>headroom, bits</th><th>overflow</th><th>clamped</th>
<th>subnormal</th><th>energy lost</th><th>SQNR dB</th><th>where it is largest</th></tr>
{% for p in report.emulation.modules %}
<tr><td><code>{{ p.module or "the model itself" }}</code></td>
<td class="n">{{ p.max_abs | brief }}</td>
<td class="n{{ ' bad' if p.overflow }}">{{ p.headroom_bits | fixed(1) }}</td>
<td class="n{{ ' bad' if p.overflow }}">{{ p.overflow }}</td>
<td class="n{{ ' bad' if p.clamped }}">{{ p.clamped }}</td>
<td class="n">{{ (100 * p.subnormal) | fixed(2) }} %</td>
<td class="n">{{ p.energy_lost | tiny }}</td>
<td class="n">{{ p.sqnr_db | fixed(1) }}</td>
<td><code>{{ p.op }}</code> {{ p.source }}</td></tr>
{% endfor %}
</table>
{% if report.emulation.weights %}
<table>
<tr><th>weight</th><th>largest</th><th>overflow</th><th>subnormal</th><th>energy lost</th></tr>
{% for w in report.emulation.weights %}
<tr><td><code>{{ w.name }}</code></td><td class="n">{{ w.max_abs | brief }}</td>
<td class="n{{ ' bad' if w.overflow }}">{{ w.overflow }}</td>
<td class="n">{{ (100 * w.subnormal) | fixed(2) }} %</td>
<td class="n">{{ w.energy_lost | tiny }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% endif %}
{% if strips %}
<h2>Error by module</h2>
<p class="quiet">Relative L2 error after the pass, in order of execution: pale at 1e-8, dark at 1.
Point at a cell for its module.</p>
{% for name, modules in strips %}
<div><code>{{ name }}</code></div>
<div class="strip">
{% for module, error in modules.items() %}
<span style="background: {{ error | shade }}" title="{{ module }}: {{ error | tiny }}"></span>
{% endfor %}
</div>
{% endfor %}
{% endif %}
{% if report.seconds %}
<h2>Time</h2>
<p>{% for step, seconds in report.seconds.items() -%}
{{ step }} {{ seconds | fixed(1) }} s
{%- if report.memory.get(step) %} ({{ (report.memory[step] / 1e6) | fixed(0) }} MB){% endif -%}
{{ ", " if not loop.last }}
{%- endfor %}</p>
{% endif %}
{% for note in report.notes %}
<p class="quiet">{{ note }}</p>
{% endfor %}
</body>
</html>"""
