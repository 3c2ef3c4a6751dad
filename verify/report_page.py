"""The static HTML page of a report: one file, no scripts, nothing loaded from elsewhere."""

import math
from collections.abc import Mapping

from jinja2 import Environment, StrictUndefined

from enginecast.verify.report_data import Report
from enginecast.verify.report_emulation import told
from enginecast.verify.verdict import times

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
        told=told,
        shade=shade,
    )
    page = environment.from_string(_PAGE)
    return page.render(report=report, verdict=verdict, strips=_strips(report)) + "\n"


def shade(error: float) -> str:
    """The colour of an error in a strip: pale at 1e-8 and below, dark at 1 and above."""
    power = math.log10(error) if error > 0 else _SMALLEST
    share = min(1.0, max(0.0, (power - _SMALLEST) / (_LARGEST - _SMALLEST)))
    return f"hsl({170 - 170 * share:.0f} 60% {92 - 50 * share:.0f}%)"


def _strips(report: Report) -> list[tuple[str, Mapping[str, float]]]:
    """Passes that changed a value somewhere, with the error of every module after them."""
    return [(p.name, p.modules) for p in report.passes if any(p.modules.values())]


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
{{ report.emulation | told }}</p>
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
<p>{% for stage, seconds in report.seconds.items() -%}
{{ stage }} {{ seconds | fixed(1) }} s
{%- if report.memory.get(stage) %} ({{ (report.memory[stage] / 1e6) | fixed(0) }} MB){% endif -%}
{{ ", " if not loop.last }}
{%- endfor %}</p>
{% endif %}
{% for note in report.notes %}
<p class="quiet">{{ note }}</p>
{% endfor %}
</body>
</html>"""
